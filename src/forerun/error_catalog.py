"""All error codes, with what, why and fix as the source code of forerun raises them.

The texts are read from the call that creates the error, so they cannot differ from what is printed. A text that depends
on a condition, a local variable or a helper has several forms. Codes that need more explanation have a note in
docs/reference/error-codes.md.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

PACKAGE = Path(__file__).parent
CODE = re.compile(r"E-[A-Z]+-\d{3}")
PAGE = "docs/reference/error-codes.md"
# Codes with a note on the page. A test compares them with the page, which is not part of an installation.
_NOTES = {
    "CHECKPOINT": (4, 5, 7, 14),
    "CLOUD": (16, 36, 37, 67, 69, 74, 92, 95, 105),
    "COMMAND": (7, 17),
    "DATA": (44, 68, 87, 99, 107, 170, 180, 215, 222, 226),
    "DOCTOR": (1, 2, 3, 4),
    "HARDWARE": (4, 40, 120),
    "HOSTS": (17, 23, 24, 31),
    "HUB": (2, 3, 7, 11, 16, 21, 40, 52, 53, 60, 61, 65),
    "JOB": (1, 5, 18, 20, 23, 54),
    "METHOD": (3,),
    "MODEL": (1, 6, 50),
    "PLAN": (9, 11, 19),
    "PROGRAM": (1,),
    "RUN": (13, 15, 23, 27, 30, 31, 35, 83, 88, 89, 90),
    "SYSTEM": (5,),
    "WEIGHTS": (3, 21, 32),
}
NOTES = frozenset(f"E-{area}-{number:03d}" for area, numbers in _NOTES.items() for number in numbers)
PLACEHOLDER = re.compile(r"<[^<>\n]*>")
MOST_FORMS = 6  # of one text; more would hide the common ones
_DEPTH = 4  # of helpers that call each other
_QUOTED_CODE = re.compile(rf'"({CODE.pattern})"(?=[,\n])')  # an argument or a constant, not a mention in a docstring
# The callers of these classes add the place to `why`: a file and a line, or the command line.
_PLACES = {
    "JobValueError": ("<place> sets <key>", ": "),
    "Mistake": ("<place>", " "),
    "_RefusedError": ("<place>", " "),
}
# Names that say nothing without their owner: `job.name` is <job name>, but `error.reason` is <reason>.
_SHORT_NAMES = {"name", "path", "code", "value", "text", "id", "kind", "size", "file", "folder", "step", "what", "why"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ErrorEntry:
    """An error code and every form of its texts. `<path>` stands for a value that is known only at run time."""

    code: str
    what: tuple[str, ...]
    why: tuple[str, ...]
    fix: tuple[str, ...]

    @property
    def note(self) -> str | None:
        """The address of the note with more explanation, or None if there is none."""
        return f"{PAGE}#{self.code.lower()}" if self.code in NOTES else None

    @property
    def texts(self) -> str:
        """What, why and fix as `forerun explain` prints them, with their labels."""
        return "\n".join(
            _labelled(label, forms) for label, forms in (("what", self.what), ("why", self.why), ("fix", self.fix))
        )

    def __str__(self) -> str:
        return f"{self.code}\n{self.texts}" + (f"\n note: {self.note}" if self.note else "")


def _labelled(label: str, forms: tuple[str, ...]) -> str:
    """Return a label and its forms: one after the label, several as a list."""
    lines = forms if len(forms) == 1 else ("one of", *("- " + form.replace("\n", "\n  ") for form in forms))
    return f"{label:>5}: " + "\n".join(lines).replace("\n", "\n       ")


def codes() -> list[str]:
    """Return all codes, without parsing the files that have them."""
    return sorted(_files())


def entry_of(code: str) -> ErrorEntry:
    """Return the entry of one of `codes()`. Its file is parsed at the first use."""
    return _module(_files()[code]).entry(code)


def what_of(code: str) -> str:
    """Return the first form of the first text of one of `codes()`."""
    call, reader = _module(_files()[code]).raise_site(code)
    return reader.shown_forms(call.args[1])[0]


def code_of(text: str) -> str:
    """Return a code as forerun writes it: `e-data-17` and `[E-DATA-017]` are E-DATA-017."""
    area, _, number = text.strip("[] ").upper().rpartition("-")
    return f"{area}-{int(number):03d}" if number.isdecimal() and len(number) <= 3 else text


@cache
def _files() -> dict[str, Path]:
    """Return the file of each code. A test checks that a code is in one place only."""
    return {
        code: path
        for path in sorted(PACKAGE.rglob("*.py"))
        for code in _QUOTED_CODE.findall(path.read_text(encoding="utf-8"))
    }


@cache
def _module(path: Path) -> SourceModule:
    return SourceModule(path)


class SourceModule:
    """The syntax tree of one file of forerun."""

    def __init__(self, path: Path) -> None:
        self._text = path.read_text(encoding="utf-8")
        self._tree = ast.parse(self._text)

    def entry(self, code: str) -> ErrorEntry:
        """Return what, why and fix of a code in this file."""
        call, reader = self.raise_site(code)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        nodes = (call.args[1], keywords.get("why"), keywords.get("fix"))
        what, why, fix = (reader.shown_forms(node) for node in nodes)
        prefix, separator = _PLACES.get(ast.unparse(call.func), ("", ""))
        if prefix:
            why = tuple(prefix + separator + form for form in why) or (prefix,)
        return ErrorEntry(code, what, why, fix)

    def raise_site(self, code: str) -> tuple[ast.Call, _Reader]:
        """Return the call that creates the error of a code, and a reader of its arguments."""
        site = next(self._calls(rf'\(\s*"{code}",', code), None)
        if site is None:  # the code is in a constant
            name = next(name for name, value in self.constants.items() if _name_or_text(value) == code)
            site = next(self._calls(rf"\(\s*{name},", name))
        return site[0], _Reader(self, site[1])

    def calls_of(self, name: str) -> Iterator[tuple[ast.Call, Function | None]]:
        """Yield the calls of a function in this module, each with the function that contains it."""
        return self._calls(rf"(?<!def )\b{name}\(", name)

    def _calls(self, pattern: str, name: str) -> Iterator[tuple[ast.Call, Function | None]]:
        """Yield the calls where the text matches `pattern` that have `name` as function or as first argument.

        Only nodes that contain such a line are visited: visiting all nodes would take longer than the parser.
        """
        for match in re.finditer(pattern, self._text):
            line = self._text[: match.end()].count("\n") + 1
            stack: list[tuple[ast.AST, Function | None]] = [(self._tree, None)]
            while stack:
                node, function = stack.pop()
                if isinstance(node, Function):
                    function = node
                if isinstance(node, ast.Call):
                    method = getattr(node.func, "attr", None)
                    if name in (method, *map(_name_or_text, [node.func, *node.args[:1]])):
                        yield node, function
                stack += [
                    (child, function)
                    for child in ast.iter_child_nodes(node)
                    if getattr(child, "lineno", line) <= line <= (getattr(child, "end_lineno", None) or line)
                ]

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """The values of the names that the module assigns."""
        values = {}
        for node in self._tree.body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    values[name] = value
        return values

    def imported(self, name: str) -> SourceModule | None:
        """Return the module of forerun from which this one imports a name."""
        for node in self._tree.body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("forerun."):
                path = PACKAGE.parent.joinpath(*str(node.module).split(".")).with_suffix(".py")
                if name in [alias.name for alias in node.names] and path.is_file():
                    return _module(path)
        return None

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The functions of the module, and the methods of its classes, by name."""
        classes = [node for node in self._tree.body if isinstance(node, ast.ClassDef)]
        nodes = [*self._tree.body, *(node for block in classes for node in block.body)]
        return {node.name: node for node in nodes if isinstance(node, Function)}


@dataclass(frozen=True)
class _Reader:
    """Reads the forms of expressions in the scope of `function`, without running it.

    `values` are the known forms of parameters. The variables in `resolving` are being read, so that
    `text = f"more {text}"` ends.
    """

    module: SourceModule
    function: Function | None = None
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    depth: int = 0
    resolving: frozenset[tuple[Function | None, str]] = frozenset()

    def shown_forms(self, node: ast.expr | None) -> tuple[str, ...]:
        """Return the forms of a text. Forms that are only a placeholder count only if there are no others."""
        forms = [] if node is None else [form for form in dict.fromkeys(self.forms(node)) if form]
        forms = [form for form in forms if has_words(form)] or forms
        return (*forms[:MOST_FORMS], *(["..."] if len(forms) > MOST_FORMS else []))

    def forms(self, node: ast.expr) -> tuple[str, ...]:
        """Return the forms of an expression. Placeholders stand for what is known only at run time."""
        match node:
            case ast.Constant(value=None):
                return ()
            case ast.Constant(value=value):
                return (str(value),)
            case ast.JoinedStr(values=values):
                return _combined([self.forms(value) for value in values])
            case ast.FormattedValue(value=value, conversion=conversion):
                return tuple(f"'{form}'" if conversion == ord("r") else form for form in self.forms(value))
            case ast.BinOp(left=left, op=ast.Add(), right=right) if not isinstance(right, ast.Constant) or isinstance(
                right.value, str
            ):
                return _combined([self.forms(left), self.forms(right)])
            case ast.IfExp(body=body, orelse=orelse):
                return self.forms(body) + self.forms(orelse)
            case ast.BoolOp(op=ast.Or(), values=values) | ast.Subscript(value=ast.Dict(values=values)):
                return tuple(form for value in values for form in self.forms(value))
            case ast.Subscript(value=ast.Name(id=name)) if (self.function, name) not in self.resolving:
                reader = replace(self, resolving=self.resolving | {(self.function, name)})
                return reader._entries(name) or (_placeholder(node),)
            case ast.Name(id=name) if (self.function, name) not in self.resolving:
                reader = replace(self, resolving=self.resolving | {(self.function, name)})
                return reader._named(name) or (_placeholder(node),)
            case ast.Call() if self.depth < _DEPTH:
                return self._called(node) or (_placeholder(node),)
        return (_placeholder(node),)

    def _entries(self, name: str) -> tuple[str, ...]:
        """Return the texts of a dictionary that the function or the module defines."""
        assigned = [] if self.function is None else _assigned(self.function, name)
        table = assigned[0] if assigned else self.module.constants.get(name)
        values = table.values if isinstance(table, ast.Dict) else []
        return tuple(form for value in values for form in self.forms(value) if has_words(form))

    def _named(self, name: str) -> tuple[str, ...]:
        """Return the forms of a variable, a parameter or a constant, or none if nothing is known about it."""
        if name in self.values:
            return self.values[name]
        values = [] if self.function is None else _assigned(self.function, name)
        module = self.module if name in self.module.constants else self.module.imported(name)
        if not values and module is not None and name in module.constants:
            values = [module.constants[name]]
        forms: tuple[str, ...] = ()
        for value in values:
            if isinstance(value, ast.AugAssign):
                extended = tuple(form + addition for form in forms for addition in self.forms(value.value))
                # Below a condition, the text exists with and without the addition.
                is_always = self.function is not None and value in self.function.body
                forms = extended if is_always else forms + extended
            else:
                forms += self.forms(value)
        if not values and self.function is not None and name in _parameters(self.function) and self.depth < _DEPTH:
            for call, caller in self.module.calls_of(self.function.name):
                reader = _Reader(self.module, caller, {}, self.depth + 1, self.resolving)
                argument = _arguments(call, self.function).get(name)
                passed = () if argument is None else reader.forms(argument)
                forms += tuple(form if has_words(form) else f"<{name.replace('_', ' ')}>" for form in passed)
            return forms
        return tuple(form for form in forms if has_words(form))

    def _called(self, call: ast.Call) -> tuple[str, ...]:
        """Return the forms of a call's result: a joined list, an entry of a table, or a helper that returns texts."""
        match call.func:
            case ast.Attribute(value=ast.Constant(value=str(separator)), attr="join"):
                items = call.args[0]
                if isinstance(items, ast.List):
                    pieces = [piece for item in items.elts for piece in ((separator,), self.forms(item))]
                    return _combined(pieces[1:])
                forms = self.forms(items.elt) if isinstance(items, ast.GeneratorExp | ast.ListComp) else ()
                return tuple(f"{form}{separator}..." for form in forms if has_words(form))
            case ast.Attribute(value=text, attr="rstrip" | "removesuffix"):
                return self.forms(text)
            case ast.Attribute(value=ast.Name(id=table), attr="get"):
                return self._entries(table) + tuple(form for value in call.args[1:] for form in self.forms(value))
            case ast.Name(id="install_command"):  # the command depends on how forerun was installed
                return tuple(f"<install command> with the extra {extra}" for extra in self.forms(call.args[0]))
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return self._returned(name, call)
        return ()

    def _returned(self, name: str, call: ast.Call) -> tuple[str, ...]:
        """Return the forms of the texts that a function of forerun returns, or none if it returns something else."""
        module = self.module if name in self.module.functions else self.module.imported(name)
        function = None if module is None else module.functions.get(name)
        if module is None or function is None or "str" not in ast.unparse(function.returns or ast.Constant("")):
            return ()
        values = {key: self.forms(value) for key, value in _arguments(call, function).items()}
        reader = _Reader(module, function, values, self.depth + 1)
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
        forms = tuple(form for value in sorted(returns, key=_position) for form in reader.forms(value))
        return forms if all(map(has_words, forms)) else ()


def has_words(form: str) -> bool:
    """Return whether a form has letters outside of its placeholders."""
    return bool(re.search(r"[A-Za-z]", PLACEHOLDER.sub("", form)))


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _arguments(call: ast.Call, function: Function) -> dict[str, ast.expr]:
    """Return the arguments of a call by the names of the function's parameters."""
    names = _parameters(function)
    positional = zip(names[1:] if names[:1] == ["self"] else names, call.args, strict=False)
    return dict(positional) | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _assigned(function: Function, name: str) -> list[ast.expr | ast.AugAssign]:
    """Return the values that a function assigns to a variable."""
    values: list[ast.expr | ast.AugAssign] = []
    for node in ast.walk(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
                | ast.NamedExpr(target=ast.Name(id=target), value=value)
            ) if target == name:
                values.append(value)
            case ast.AugAssign(target=ast.Name(id=target)) if target == name:
                values.append(node)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=elements)):
                values += [value for t, value in zip(targets, elements, strict=False) if _name_or_text(t) == name]
    return sorted(values, key=_position)


def _position(node: ast.expr | ast.AugAssign) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _name_or_text(node: ast.expr) -> object:
    return node.id if isinstance(node, ast.Name) else getattr(node, "value", None)


def _combined(pieces: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the concatenation of pieces: the first form of each, then each other form of one piece.

    All combinations would be too many, and most are impossible, because the pieces depend on the same condition.
    """
    # Endings such as "s" of a plural are not another form.
    pieces = [piece[:1] if all(len(form) <= 3 for form in piece) else piece for piece in pieces]
    first = [piece[0] if piece else "" for piece in pieces]
    others = [[*first[:n], form, *first[n + 1 :]] for n, piece in enumerate(pieces) for form in piece[1:]]
    return tuple("".join(texts) for texts in (first, *others))


def _placeholder(node: ast.expr) -> str:
    """Return the placeholder of a value that is known only at run time.

    It is the name of the function of forerun that is called, else the last name in the expression.
    """
    called = {id(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    names = [part for part in names if id(part) not in called] or names
    if not names:
        return "<...>"
    last: ast.expr = max(names, key=lambda part: (part.end_lineno or 0, part.end_col_offset or 0))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        is_own = node.func.id.islower() and node.func.id not in {*vars(builtins), "clean", "redact", "shortened"}
        last = node.func if is_own else last
    label = last.id if isinstance(last, ast.Name) else getattr(last, "attr", "...")
    if label in _SHORT_NAMES and isinstance(last, ast.Attribute) and isinstance(last.value, ast.Name):
        label = f"{last.value.id} {label}" if last.value.id != "self" else label
    return f"<{label.strip('_').replace('_', ' ').lower()}>"
