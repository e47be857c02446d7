"""The arguments of a command, derived from the signature and the `Args:` of its function.

The function of a command is the public function of a verb, or a function of `cli` for a command that needs more. The
latter takes `**options` and names with `options_of` the verb whose parameters these are:

```python
@options_of("forerun.verbs.export.export:export")
def export(*, json: bool = False, **options: Any) -> int: ...
```

Parameters without a default are positional, all others are options: `bool` is a flag (`--no-NAME` if it is True by
default), `Literal` has choices, and the types of `verbs.option_types` say how other values are read.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from forerun.cli.parser import Parser
from forerun.verbs.option_types import Value, comma_list

Function = TypeVar("Function", bound=Callable[..., Any])
PYTHON_ONLY = ("reporter", "display", "progress")  # parameters that the command line sets itself
_VERBS: dict[Callable[..., Any], tuple[tuple[str, ...], tuple[str, ...]]] = {}


def options_of(*verbs: str, omit: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Say which verbs have the parameters that a function of `cli` takes as `**options`.

    Args:
      *verbs: functions, or dataclasses of options, as `module:name`.
      omit: parameters of the verbs that the command line does not have.
    """

    def mark(function: Function) -> Function:
        _VERBS[function] = (verbs, omit)
        return function

    return mark


def load_function(path: str) -> Callable[..., Any]:
    """Import the function `module:name`."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = attrgetter(name)(importlib.import_module(module))
    return function


@dataclass(frozen=True)
class Option:
    """A parameter as an argument of the command line."""

    parameter: inspect.Parameter
    type: Any  # the annotation without `Annotated` and None
    value: Value
    text: str  # its entry in `Args:`

    @property
    def is_positional(self) -> bool:
        """Whether the argument has no option name."""
        kind, default = self.parameter.kind, self.parameter.default
        is_required = kind is kind.POSITIONAL_OR_KEYWORD and default is inspect.Parameter.empty
        return kind is kind.VAR_POSITIONAL or is_required or self.value.is_positional

    @property
    def flag(self) -> str:
        """The name of the option, such as `--max-usd`."""
        prefix = "no-" if self.parameter.default is True else ""
        return f"--{self.value.option or prefix + self.parameter.name.replace('_', '-')}"


def options(function: Callable[..., Any]) -> list[Option]:
    """Return the arguments of a function, and those of the verbs behind its `**options`.

    A parameter that the function repeats, for example to make it optional, has the help text of the verb.
    """
    verbs, omit = _VERBS.get(function, ((), ()))
    sources = [function, *map(load_function, verbs)]
    own_texts = argument_texts(function.__doc__ or "")
    verb_texts: dict[str, str] = {}
    for verb in sources[1:]:
        verb_texts = argument_texts(verb.__doc__ or "") | verb_texts
    found: dict[str, Option] = {}
    for source in sources:
        for name, parameter in inspect.signature(source).parameters.items():
            if name in (*found, *omit, *PYTHON_ONLY) or parameter.kind is parameter.VAR_KEYWORD:
                continue
            # Not `typing.get_type_hints`: a name that only type checkers import, such as a result, would fail.
            plain, value = _type_and_value(eval(parameter.annotation, vars(sys.modules[source.__module__])))
            found[name] = Option(parameter, plain, value, own_texts.get(name) or value.help or verb_texts.get(name, ""))
    # The own options of the command come last: those of the verb matter more.
    own = set(inspect.signature(function).parameters)
    return sorted(found.values(), key=lambda option: option.parameter.name in own and not option.is_positional)


def _type_and_value(annotation: Any) -> tuple[Any, Value]:
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not types.NoneType]
        return _type_and_value(members[0]) if len(members) == 1 else (str, Value())
    if get_origin(annotation) is Annotated:
        plain, value = get_args(annotation)
        return _type_and_value(plain)[0], value
    return annotation, Value()


def argument_texts(docstring: str) -> dict[str, str]:
    """Return the entries of the section `Args:` or `Attributes:` of a Google-style docstring, each on one line."""
    section = re.search(r"^(?:Args|Attributes):\n((?:(?: .*)?\n)*)", inspect.cleandoc(docstring) + "\n", flags=re.M)
    entries = re.split(r"^  (?=\S)", section[1], flags=re.M)[1:] if section else []
    pairs = [" ".join(entry.split()).partition(": ") for entry in entries]
    return {name.lstrip("*"): text for name, _, text in pairs}


def make_parser(name: str, function: Callable[..., Any], summary: str, example: str) -> Parser:
    """Return the parser of a command."""
    parser = Parser(
        prog=f"forerun {name}",
        description=f"{summary[0].upper()}{summary[1:]}",
        epilog=f"example: {example}",
        allow_abbrev=False,
        # A parameter without an argument is not passed, so only the signature knows its default.
        argument_default=argparse.SUPPRESS,
    )
    found = options(function)
    flags = {option.parameter.name: option.flag for option in found if not option.is_positional}
    groups: dict[str, Any] = {}
    for option in found:
        group = option.value.group
        if group and group not in groups:
            groups[group] = parser.add_mutually_exclusive_group()
        settings = _positional(option) if option.is_positional else _settings(option)
        names = () if option.is_positional else (option.flag,)
        settings |= {"dest": option.parameter.name, "help": _help(option, flags)}
        (groups[group] if group else parser).add_argument(*names, **settings)
    return parser


def _positional(option: Option) -> dict[str, Any]:
    parameter, plain = option.parameter, option.type
    is_list = option.value.parse is None and get_origin(plain) is not None and get_origin(plain) is not Literal
    if parameter.kind is parameter.VAR_POSITIONAL:
        count = {"nargs": "*", "default": []}
    elif parameter.default is not parameter.empty:
        count = {"nargs": "?"}
    else:
        count = {"nargs": "+"} if is_list else {}
    return {**_value(option), **count, "metavar": option.value.metavar or parameter.name.upper()}


def _settings(option: Option) -> dict[str, Any]:
    if option.type is bool:
        return {"action": "store_false" if option.parameter.default is True else "store_true"}
    settings = _value(option)
    if option.value.is_repeatable:
        settings["action"] = "extend" if option.value.parse is comma_list else "append"
    if option.value.without_value is not None:
        settings |= {"nargs": "?", "const": option.value.without_value}
    if option.parameter.default is option.parameter.empty:
        settings["required"] = True
    return settings


def _value(option: Option) -> dict[str, Any]:
    """Return what argparse must know about the value: choices, or its type and its name in the help."""
    if get_origin(option.type) is Literal:
        return {"choices": get_args(option.type)}
    parse = option.value.parse or (option.type if option.type in (int, float) else str)
    return {"type": parse, "metavar": option.value.metavar or option.parameter.name.upper()}


def _help(option: Option, flags: Mapping[str, str]) -> str:
    """Return the help text: the entry of `Args:` with names of options, and the default of the signature."""
    text = re.sub(r"`(\w+)`", lambda match: flags.get(match[1], match[1]), option.text).replace("`", "")
    default = option.parameter.default
    shows_default = not isinstance(default, bool) and default not in (None, (), "", option.parameter.empty)
    if shows_default and "default:" not in text:
        text = f"{text.removesuffix('.')} (default: {default})"
    return text.removesuffix(".").replace("%", "%%")


def call(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function with the values of a parsed command line."""
    parameters = inspect.signature(function).parameters.values()
    keywords, positional = dict(values), []
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += keywords.pop(parameter.name, [])
                break
            positional.append(keywords.pop(parameter.name, parameter.default))
    return function(*positional, **keywords)
