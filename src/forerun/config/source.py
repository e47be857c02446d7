"""A YAML reader that returns plain values and the line of each key.

Scalars follow the core schema of YAML 1.2: `8e-5` is a number, `no` and `on` are texts, and only `true` and `false` are
booleans. Tags, anchors and repeated keys are rejected, so that a file means exactly what it shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forerun.errors import UserError, did_you_mean
from forerun.files import read_regular
from forerun.units import MIB

MAX_JOB_BYTES = MIB
MAX_VALUES = 10_000  # without a limit, a MiB of short values would take a minute to parse

KeyPath = tuple[str | int, ...]
BEGIN = "`forerun init new.yaml` writes a job to begin with"

_TAG = "tag:yaml.org,2002:"
_CORE: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)


@dataclass(frozen=True)
class Source:
    """The values of a YAML text, and the line of each key, counted from 1."""

    tree: Any
    lines: dict[KeyPath, int]


class _RefusedError(Exception):
    """Valid YAML that a job may not contain."""

    def __init__(self, code: str, what: str, *, line: int, fix: str) -> None:
        super().__init__(what)
        self.code, self.what, self.line, self.fix = code, what, line, fix


class _Loader(yaml.SafeLoader):
    """Composes YAML nodes, which have line numbers. Constructs no objects."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()
        line = event.start_mark.line + 1 if event.start_mark else 1
        self._values += 1
        if self._values > MAX_VALUES:
            raise _RefusedError(
                "E-JOB-051",
                f"a job has more than {MAX_VALUES} keys and values",
                line=line,
                fix="check that this is the file you mean",
            )
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _RefusedError(
                "E-JOB-052",
                "YAML anchors and aliases (& and *) are not allowed in a job",
                line=line,
                fix="write the value out, or put text in quotes",
            )
        if tag := getattr(event, "tag", None):
            raise _RefusedError(
                "E-JOB-053",
                f"the YAML tag {tag} is not allowed in a job",
                line=line,
                fix="remove the tag, or put text in quotes",
            )
        return super().compose_node(parent, index)


class Dumper(yaml.SafeDumper):
    """Writes YAML that this module reads back as the same values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _reader_or_writer in (_Loader, Dumper):
    _reader_or_writer.yaml_implicit_resolvers = {}
    for _name, _pattern, _first in _CORE:
        _starts = [*_first, ""] if _name == "null" else list(_first)
        _reader_or_writer.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _starts)


class _LineDumper(Dumper):
    """Writes texts that contain line ends in double quotes, so that they stay on one line."""


def _one_line(dumper: _LineDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if "\n" in text else None)


_LineDumper.add_representer(str, _one_line)


def flow(value: Any) -> str:
    """Return a value as YAML on one line, as in a file or in an override."""
    text = yaml.dump(value, Dumper=_LineDumper, default_flow_style=True, allow_unicode=True, width=1_000_000)
    return str(text).removesuffix("\n").removesuffix("\n...")


def read_file(path: Path) -> Source:
    """Read the job file at `path`. Raise UserError if it is not a YAML mapping."""
    text = _text(path)
    source = _parsed(text, lambda line: f"{path}:{line}", _syntax_fix)
    if source.tree is None:
        raise UserError("E-JOB-009", f"{path} is empty", why="a job needs at least model and data", fix=BEGIN)
    if not isinstance(source.tree, dict):
        raise UserError(
            "E-JOB-010",
            f"{path} is not a job",
            why=f"{path}:1 does not start with 'key: value'",
            fix="write lines like: batch: 32",
        )
    return source


def read_value(text: str, where: str) -> Any:
    """Return the value of a text from the command line, as if it were in a file. `where` is for errors."""
    return _parsed(text, lambda _: where, lambda _: "put quotes around the value, like name='\"a: b\"'").tree


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise IsADirectoryError(path)
        return read_regular(path, MAX_JOB_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"byte {error.start} cannot be read"
        raise UserError("E-JOB-011", f"{path} is not UTF-8 text", why=why, fix="save it as UTF-8") from None
    except (FileNotFoundError, NotADirectoryError):
        raise UserError("E-JOB-012", f"there is no file {path}", why=_nearby(path), fix=_suggestion(path)) from None
    except IsADirectoryError:
        raise UserError(
            "E-JOB-013", f"{path} is a folder", why="a job is one YAML file", fix=_suggestion(path / "job.yaml")
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            "E-JOB-014", f"{path} cannot be read", why=str(error), fix="check the path and its permissions"
        ) from None


def _job_files(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml"))
    except OSError:
        return []


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    return f"looked in {path.parent.absolute()}"


def _suggestion(path: Path) -> str:
    files = _job_files(path.parent)
    near = did_you_mean(path.name, files) or next((f for f in files if Path(f).stem == path.name), None)
    if near:
        return f"did you mean '{path.parent / near}'?"
    if files:
        return f"job files there: {', '.join(files[:5])}; {BEGIN}"
    return f"name the path of a job file that exists; {BEGIN}"


def _parsed(text: str, where: Callable[[int], str], syntax_fix: Callable[[str], str]) -> Source:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        return Source(None if node is None else _value(node, (), lines), lines)
    except _RefusedError as error:
        raise UserError(error.code, error.what, why=where(error.line), fix=error.fix) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(
            "E-JOB-015",
            "a character that YAML does not allow",
            why=f"{where(line)}: {error.reason}",
            fix="remove the character",
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where(mark.line + 1 if mark else 1)
        problem = error.problem or error.context or "syntax error"
        raise UserError(
            "E-JOB-016",
            "this is not valid YAML",
            why=f"{place}: {problem}",
            fix=f"correct the syntax: {syntax_fix(problem)}",
        ) from None
    except RecursionError:
        raise UserError(
            "E-JOB-017", "nested too deeply", why=where(1), fix="a job needs at most three levels"
        ) from None
    finally:
        if loader is not None:
            loader.dispose()


def _syntax_fix(problem: str) -> str:
    if "\\t" in problem:
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "indent all keys of a section equally; text that contains ': ' needs quotes"
    if "expected a single document" in problem or "but found another document" in problem:
        return "a job is one document: remove the '---' line"
    return "look for a missing ':' or quote and for uneven indentation, on this line or the one before"


def _value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            items.append(_value(item, (*path, index), lines))
        return items
    return _scalar(node)


def _mapping(node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise _RefusedError(
                "E-JOB-054", "a key is a list or a mapping", line=line, fix="write lines like: batch: 32"
            )
        key: str = key_node.value
        if key in tree:
            first = lines[*path, key]
            raise _RefusedError(
                "E-JOB-055",
                f"the key '{key}' appears twice, first on line {first}",
                line=line,
                fix="keep one of the two lines",
            )
        lines[*path, key] = line
        tree[key] = _value(value_node, (*path, key), lines)
    return tree


def _scalar(node: yaml.Node) -> Any:
    text: str = node.value
    kind = node.tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        try:
            return int(text[2:], {"0o": 8, "0x": 16}[text[:2]]) if text[:2] in ("0o", "0x") else int(text)
        except ValueError:
            line = node.start_mark.line + 1
            raise _RefusedError(
                "E-JOB-056", f"a number has {len(text)} digits", line=line, fix="write a smaller number"
            ) from None
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
