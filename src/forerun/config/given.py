"""What the job file and the command line say together, before it is checked against the schema."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config import keys
from forerun.config.schema import Job
from forerun.config.source import KeyPath, read_file, read_value
from forerun.errors import UserError

COMMAND_LINE = "command line"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Given:
    """The merged tree and the line of each key in the file; a key of the command line has line None."""

    tree: dict[str, Any]
    lines: dict[KeyPath, int | None]
    file: Path

    def place(self, path: KeyPath) -> str:
        """`job.yaml:7` or `command line` for a key, or for the nearest section around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                line = self.lines[path[:length]]
                return COMMAND_LINE if line is None else f"{self.file}:{line}"
        return str(self.file)

    def on_command_line(self, path: KeyPath) -> bool:
        return self.place(path) == COMMAND_LINE


def read(file: Path, overrides: Sequence[str]) -> Given:
    """The file with the overrides applied from left to right and its local paths made absolute."""
    source = read_file(file)
    given = Given({}, {**source.lines}, file)
    for name, value in source.tree.items():
        given.tree[name] = _expanded(given, name, value)
    for override in overrides:
        _apply(given, override)
    _make_paths_absolute(given)
    return given


def _expanded(given: Given, name: str, value: Any) -> Any:
    """A section from its shorthand; the key that the text means stands on the same line."""
    field = Job.model_fields.get(name)
    section = keys.expand(field, value) if field else value
    if section is not value:
        for inner in section:
            given.lines[name, inner] = given.lines[name,]
    return section


def _apply(given: Given, override: str) -> None:
    key, equals, text = override.partition("=")
    names = tuple(key.split("."))
    if not equals or not all(names):
        raise UserError(
            f"'{override}' is not an override",
            why="after the job file come overrides of the form key=value",
            fix="write for example: optimizer.lr=8e-5",
        )
    value = read_value(text, f"{COMMAND_LINE}: {override}")
    target = given.tree
    for depth, name in enumerate(names[:-1], start=1):
        if target.get(name) is None:
            target[name] = {}
            given.lines.setdefault(names[:depth], None)
        target = target[name]
        if not isinstance(target, dict):
            section = ".".join(names[:depth])
            why = f"{COMMAND_LINE}: {section} holds a value, not a section"
            raise UserError(f"unknown key '{key}'", why=why, fix=f"write {section}={text}")
    for known in [path for path in given.lines if path[: len(names)] == names]:
        del given.lines[known]
    given.lines.update(dict.fromkeys(_places(names, value)))
    target[names[-1]] = _expanded(given, names[0], value) if len(names) == 1 else value


def _places(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _places((*path, name), inner)


def _make_paths_absolute(given: Given) -> None:
    """A path in the file is seen from the file's folder, one on the command line from where the user stands."""
    for section, name in (("data", "path"), ("data", "tokenizer"), ("model", "name")):
        tree = given.tree.get(section)
        if not isinstance(tree, dict):
            continue
        value = tree.get(name)
        if not isinstance(value, str) or not value or _URL.match(value) or (name, value) == ("tokenizer", "bytes"):
            continue
        folder = Path() if given.on_command_line((section, name)) else given.file.parent
        path = os.path.abspath(folder / os.path.expanduser(value))
        if section == "data" or _is_model_folder(value, path):
            tree[name] = path


def _is_model_folder(value: str, path: str) -> bool:
    """`./x`, `~/x`, `/x`, or a folder with a checkpoint in it: `owner/name` is of the hub unless it is one."""
    written = value.startswith(("./", "../", "~", "/"))
    return written or ("/" in value and os.path.exists(os.path.join(path, "config.json")))
