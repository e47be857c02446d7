"""Texts of an expression in forerun's source code, without running it.

An error's text is often an f-string, a conditional, a local variable or the result of a helper. `Reader.forms` returns
every form that the text can have. A value that is known only at run time becomes a placeholder such as `<path>`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

PACKAGE = Path(__file__).parent
PLACEHOLDER = re.compile(r"<[^<>\n]*>")
# Forms of one text. More would hide the common ones.
MOST_FORMS = 6
_MOST_RETURNED = 16  # by a helper; with more, its name is the placeholder
_DEPTH = 8
# Names that say nothing without their owner: `job.name` is <job name>, but `error.reason` is <reason>.
_SHORT_ATTRIBUTES = {"name", "path", "code", "value", "text", "id", "kind", "size", "file", "folder", "step"}
# Calls that show their first argument in another form.
_SHOWING_CALLS = {
    "str", "repr", "list", "sorted", "tuple", "set", "map", "abs", "clean", "redact", "fspath", "quote", "shortened",
    "Path", "join", "max", "min", "next", "iter", "flow", "dumps", "getattr", "islice", "ceil",
}  # fmt: skip
_LABELS = {"strerror": "error", "first line": "error", "said": "error", "why": "reason"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class SourceModule:
    """The syntax tree of one file of forerun."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree, parsed at the first use."""
        return ast.parse(self.text)

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """The values of the names that the module assigns."""
        values = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                values[node.target.id] = node.value
        return values

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The functions of the module, and the methods of its classes, by name."""
        classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        nodes = [*self.tree.body, *(node for block in classes for node in block.body)]
        return {node.name: node for node in nodes if isinstance(node, Function)}

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Names imported from other modules of forerun: module and name."""
        return {
            alias.asname or alias.name: (node.module, alias.name)
            for node, _ in self._nodes
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("forerun")
            for alias in node.names
        }

    @cached_property
    def calls(self) -> list[tuple[ast.Call, Function | None]]:
        """All calls in the order of the source, each with the innermost function that contains it."""
        calls = [(node, function) for node, function in self._nodes if isinstance(node, ast.Call)]
        return sorted(calls, key=lambda call: (call[0].lineno, call[0].col_offset))

    @cached_property
    def _nodes(self) -> list[tuple[ast.AST, Function | None]]:
        """All calls and imports. One walk for both, without `ast.walk`, because it takes longer than the parser."""
        nodes: list[tuple[ast.AST, Function | None]] = []
        stack: list[tuple[ast.AST, Function | None]] = [(self.tree, None)]
        while stack:
            node, function = stack.pop()
            if isinstance(node, ast.Call | ast.ImportFrom):
                nodes.append((node, function))
            elif isinstance(node, Function):
                function = node
            for name in node._fields:
                value = getattr(node, name, None)
                children = value if isinstance(value, list) else (value,)
                stack.extend((child, function) for child in children if isinstance(child, ast.AST))
        return nodes


@cache
def source_module(path: Path) -> SourceModule:
    """Return the module of a file. Each file is read once."""
    return SourceModule(path)


def _imported(name: str) -> SourceModule | None:
    folder = PACKAGE.parent.joinpath(*name.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return source_module(path) if path.is_file() else None


@dataclass(frozen=True)
class Reader:
    """Reads expressions in the scope of `function`. `arguments` are the known forms of its parameters."""

    module: SourceModule
    function: Function | None = None
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    depth: int = 0
    # Variables that are being resolved, so that `text = f"... {text}"` ends.
    resolving: frozenset[tuple[str, str]] = frozenset()

    def forms(self, node: ast.expr) -> tuple[str, ...]:
        """Return the forms of an expression. Placeholders stand for what is known only at run time."""
        return _distinct(self._forms(node))

    def _forms(self, node: ast.expr) -> tuple[str, ...]:
        match node:
            case ast.Constant(value=None):
                return ()
            case ast.Constant(value=value):
                return (str(value),)
            case ast.JoinedStr(values=values):
                return _combined([self._forms(value) for value in values])
            case ast.FormattedValue():
                return self._formatted(node)
            case ast.BinOp(left=left, op=ast.Add(), right=right) if not (_is_number(left) or _is_number(right)):
                return _combined([self._forms(left), self._forms(right)])
            case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mult()):  # "-r " * is_folder
                return (text, "")
            case ast.IfExp(body=body, orelse=orelse):
                return self._forms(body) + self._forms(orelse)
            case ast.BoolOp(op=ast.Or(), values=values):
                return tuple(form for value in values for form in self._forms(value))
            case ast.NamedExpr(value=value):
                return self._forms(value)
            case ast.Name(id=name):
                variable = (self.function.name if self.function else "", name)
                if variable in self.resolving:
                    return (placeholder(node),)
                return replace(self, resolving=self.resolving | {variable})._named(name) or (placeholder(node),)
            case ast.Subscript(value=ast.Dict(values=values)):
                return tuple(form for value in values for form in self._forms(value))
            case ast.Subscript(value=ast.Name(id=name)) if self.depth < _DEPTH:
                return replace(self, depth=self.depth + 1)._entries(name) or (placeholder(node),)
            case ast.Call() if self.depth < _DEPTH:
                return replace(self, depth=self.depth + 1)._called(node) or (placeholder(node),)
        return (placeholder(node),)

    def _inside(
        self,
        module: SourceModule,
        function: Function | None = None,
        arguments: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Reader:
        """Return a reader for another function, one level deeper."""
        return Reader(module, function, arguments or {}, self.depth + 1, self.resolving)

    def _formatted(self, node: ast.FormattedValue) -> tuple[str, ...]:
        forms = self._forms(node.value)
        if isinstance(node.format_spec, ast.JoinedStr) and isinstance(node.value, ast.Constant | ast.Name):
            (spec,) = self._forms(node.format_spec)[:1] or ("",)
            forms = tuple(_number(form, spec) for form in forms)
        return tuple(f"'{form}'" for form in forms) if node.conversion == ord("r") else forms

    def _entries(self, name: str) -> tuple[str, ...]:
        """Return the texts of a dictionary that the function or the module defines, or none if it is not small."""
        local = _assigned(self.function, name) if self.function is not None else []
        table = local[0] if local else self.module.constants.get(name)
        if not isinstance(table, ast.Dict):
            return ()
        forms = tuple(form for value in table.values for form in self._forms(value))
        return forms if len(forms) <= MOST_FORMS and all(map(has_words, forms)) else ()

    def _named(self, name: str) -> tuple[str, ...]:
        """Return the forms of a variable, a parameter or a constant, or none if nothing is known about it."""
        if name in self.arguments:
            return self.arguments[name]
        if self.function is not None:
            assigned = _assigned(self.function, name)
            if assigned:
                return self._of_variable(name, assigned)
            if name in _parameters(self.function):
                return self._of_parameter(name)
        if name in self.module.constants:
            forms = self._inside(self.module).forms(self.module.constants[name])
            return tuple(form for form in forms if not PLACEHOLDER.fullmatch(form))
        module = self._origin(name)
        return () if module is None else self._inside(module[0])._named(module[1])

    def _of_variable(self, name: str, assigned: list[ast.expr | ast.AugAssign]) -> tuple[str, ...]:
        """Return the forms of all values that the function assigns to a variable."""
        assert self.function is not None
        forms: tuple[str, ...] = ()
        for value in assigned:
            if isinstance(value, ast.AugAssign) and not _is_number(value.value):
                extended = tuple(form + addition for form in forms for addition in self.forms(value.value))
                # Below a condition, the text exists with and without the addition.
                forms = extended if value in self.function.body else forms + extended
            elif isinstance(value, ast.expr):
                forms += tuple(form if has_words(form) else f"<{_spaced(name)}>" for form in self.forms(value) if form)
        return forms

    def _of_parameter(self, name: str) -> tuple[str, ...]:
        """Return the forms that callers in the same module pass for a parameter of the function."""
        assert self.function is not None
        names = _parameters(self.function)
        forms: list[str] = []
        for call, caller in self.module.calls:
            if _called_name(call) != self.function.name:
                continue
            reader = self._inside(self.module, caller)
            arguments = _bound(call, names)
            value = arguments.get(name) or _default(self.function, name)
            if value is not None:
                forms += [form for form in reader.forms(value) if form]
        return tuple(form if has_words(form) else f"<{_spaced(name)}>" for form in forms)

    def _called(self, call: ast.Call) -> tuple[str, ...]:
        """Return the forms of a call's result: of a joined list, or of a function of forerun that returns texts."""
        match call.func:
            case ast.Attribute(value=ast.Constant(value=str(separator)), attr="join"):
                return self._joined(separator, call.args[0])
            case ast.Attribute(value=value, attr="removeprefix" | "removesuffix" | "strip" | "rstrip" | "capitalize"):
                return self._forms(value)
            case ast.Attribute(value=ast.Name(id=table), attr="get"):
                default = self._forms(call.args[1]) if len(call.args) > 1 else ()
                return self._entries(table) + default
            case ast.Name(id="install_command"):  # the command depends on how forerun was installed
                return tuple(f"<install command> with the extra {extra}" for extra in self._forms(call.args[0]))
            case ast.Name(id="str" | "clean" | "redact") if call.args:
                return self._forms(call.args[0])
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                return self._returned(name, call)
        return ()

    def _joined(self, separator: str, items: ast.expr) -> tuple[str, ...]:
        if isinstance(items, ast.List | ast.Tuple):
            pieces: list[tuple[str, ...]] = []
            for item in items.elts:
                forms = (placeholder(item),) if isinstance(item, ast.Starred) else self._forms(item)
                pieces += [(separator,), forms] if pieces else [forms]
            return _combined(pieces)
        if isinstance(items, ast.GeneratorExp | ast.ListComp):
            forms = self._forms(items.elt)
            if any(map(has_words, forms)):
                return tuple(f"{form}{separator}..." for form in forms)
            return (placeholder(items.generators[0].iter),)
        return ()

    def _origin(self, name: str) -> tuple[SourceModule, str] | None:
        if name not in self.module.imports:
            return None
        module, original = self.module.imports[name]
        imported = _imported(module)
        return None if imported is None else (imported, original)

    def _returned(self, name: str, call: ast.Call) -> tuple[str, ...]:
        module, original = (self.module, name) if name in self.module.functions else self._origin(name) or (None, name)
        if module is None or original not in module.functions:
            return ()
        function = module.functions[original]
        if function.returns is None or "str" not in ast.unparse(function.returns):
            return ()
        arguments = {
            parameter: tuple(form if has_words(form) else placeholder(value) for form in self.forms(value))
            for parameter, value in _bound(call, _parameters(function)).items()
        }
        reader = self._inside(module, function, arguments)
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
        returns.sort(key=lambda value: value.lineno)
        forms = _distinct(form for value in returns for form in reader.forms(value))
        return forms if len(forms) <= _MOST_RETURNED and all(map(has_words, forms)) else ()


def has_words(form: str) -> bool:
    """Return whether a form has letters outside of its placeholders."""
    return bool(re.search(r"[A-Za-z]", PLACEHOLDER.sub("", form)))


def placeholder(node: ast.expr) -> str:
    """Return the placeholder of a value that is known only at run time."""
    return f"<{_label(node)}>"


def _label(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return _spaced(name)
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if name in _SHORT_ATTRIBUTES and owner != "self":
            return f"{_spaced(owner)} {name}"
        case ast.Attribute(attr=name):
            return _spaced(name)
        case ast.Call(func=ast.Name(id="len"), args=[argument]):
            return f"number of {_label(argument)}"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[*_, last]) if name in _SHOWING_CALLS:
            labels = [_label(argument) for argument in ([last] if name == "map" else node.args)]
            return next((label for label in labels if label != "..."), "...")
        case ast.Call(func=ast.Name(id="type")):
            return "type"
        case ast.Call(func=ast.Attribute(value=value), args=[]):
            return _label(value)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return _spaced(name)
        case ast.BinOp(left=ast.Constant(), right=value) | ast.BinOp(left=value) | ast.UnaryOp(operand=value):
            return _label(value)
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.IfExp(body=value):
            return _label(value)
        case ast.NamedExpr(target=value) | ast.BoolOp(values=[value, *_]):
            return _label(value)
        case ast.JoinedStr(values=values):
            return next((_label(value.value) for value in values if isinstance(value, ast.FormattedValue)), "...")
        case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
            return _label(first.iter)
    return "..."


def _spaced(name: str) -> str:
    label = name.strip("_").replace("_", " ").lower()
    return _LABELS.get(label, label)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def _number(form: str, spec: str) -> str:
    try:
        return format(float(form) if "." in form else int(form), spec)
    except ValueError:
        return form


def _called_name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _distinct(forms: Iterator[str] | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(forms))


def _combined(pieces: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the concatenation of pieces: the first form of each, then each other form of one piece.

    All combinations would be too many, and most are impossible, because the pieces depend on the same condition.
    """
    pieces = [piece or ("",) for piece in pieces]
    # Endings such as "s" of a plural are not another form.
    pieces = [piece[:1] if all(len(form) <= 3 for form in piece) else piece for piece in pieces]
    first = [piece[0] for piece in pieces]
    forms = ["".join(first)]
    for n, piece in enumerate(pieces):
        forms += ["".join([*first[:n], form, *first[n + 1 :]]) for form in piece[1:]]
    return _distinct(tuple(forms))


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _default(function: Function, name: str) -> ast.expr | None:
    positional = [*function.args.posonlyargs, *function.args.args]
    pairs = [
        *zip(reversed(positional), reversed(function.args.defaults), strict=False),
        *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
    ]
    return next((default for argument, default in pairs if argument.arg == name), None)


def _bound(call: ast.Call, names: list[str]) -> dict[str, ast.expr]:
    positional = names[1:] if names[:1] in (["self"], ["cls"]) else names
    values = dict(zip(positional, call.args, strict=False))
    return values | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _assigned(function: Function, name: str) -> list[ast.expr | ast.AugAssign]:
    """Return the values that a function assigns to a variable, in the order of the source."""
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
                pairs = zip(targets, elements, strict=False)
                values += [value for target, value in pairs if isinstance(target, ast.Name) and target.id == name]
    return sorted(values, key=lambda value: (value.lineno, value.col_offset))
