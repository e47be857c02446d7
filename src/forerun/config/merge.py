"""The job file merged with the overrides of the command line, before validation against the schema."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.config import keys
from forerun.config.schema import Job
from forerun.config.source import KeyPath, read_file, read_value
from forerun.errors import UserError
from forerun.storage.address import Address

COMMAND_LINE = "command line"
# Values of path keys that are names and not paths.
_NO_PATH: dict[tuple[str, ...], str] = {("data", "tokenizer"): "bytes", ("data", "chat_template"): "chatml"}


@dataclass(frozen=True)
class Given:
    """The merged values and their origin.

    Args:
      tree: the values, with shorthands expanded.
      lines: the line of each key in the file, or None for a key of the command line.
      file: the job file.
    """

    tree: dict[str, Any]
    lines: dict[KeyPath, int | None]
    file: Path

    def place(self, path: KeyPath) -> str:
        """Return the origin of a key, such as `job.yaml:7` or `command line`.

        If the key is not set, the origin is that of the nearest section that contains it.
        """
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                line = self.lines[path[:length]]
                return COMMAND_LINE if line is None else f"{self.file}:{line}"
        return str(self.file)

    def on_command_line(self, path: KeyPath) -> bool:
        return self.place(path) == COMMAND_LINE


def read(file: Path, overrides: Sequence[str], folder: Path | None = None) -> Given:
    """Read a job file, apply the overrides from left to right, and make local paths absolute.

    Args:
      file: the job file.
      overrides: texts of the form `a.b=c`.
      folder: what paths in the file are relative to, if it is not the folder of the file.
    """
    given = read_unmerged(file)
    if folder is not None:
        given = replace(given, file=folder / file.name)
    for override in overrides:
        _apply(given, override)
    _make_paths_absolute(given)
    return given


def read_unmerged(file: Path) -> Given:
    """Read a job file without overrides. Its paths are as the user wrote them."""
    source = read_file(file)
    given = Given({}, {**source.lines}, file)
    for name, value in source.tree.items():
        given.tree[name] = _expanded(given, name, value)
    return given


def with_section(given: Given, section: Sequence[str], overrides: Sequence[str]) -> Given:
    """Return the values of a file in which the keys of a nested section replace those of the file.

    A section inside of it is merged key by key with that of the file. Any other value, also a shorthand or null,
    replaces the complete value. Then the overrides are applied, and local paths are made absolute.

    Args:
      given: the values of the file, from `read_unmerged`.
      section: the names of the nested section, such as ("stages", "qat"). Its first name is not in the result.
      overrides: texts of the form `a.b=c`, without the names of the section.
    """
    merged = Given(
        {name: deepcopy(value) for name, value in given.tree.items() if name != section[0]},
        {path: line for path, line in given.lines.items() if path[0] != section[0]},
        given.file,
    )
    prefix = tuple(section)
    inner = {path[len(prefix) :]: line for path, line in given.lines.items() if path[: len(prefix)] == prefix}
    for name, value in (_section(given.tree, section) or {}).items():
        _replace(merged, merged.tree, (name,), deepcopy(value), inner)
    for override in overrides:
        _apply(merged, override)
    _make_paths_absolute(merged)
    return merged


def _replace(
    given: Given, tree: dict[str, Any], path: tuple[str, ...], value: Any, lines: Mapping[KeyPath, int | None]
) -> None:
    """Replace the value at the end of `path`, which is in `tree`, or merge it if both values are sections."""
    before = tree.get(path[-1])
    if isinstance(value, dict) and isinstance(before, dict):
        given.lines[path] = lines[path]
        for name, inner in value.items():
            _replace(given, before, (*path, name), inner, lines)
        return
    for known in [known for known in given.lines if known[: len(path)] == path]:
        del given.lines[known]
    given.lines.update({known: line for known, line in lines.items() if known[: len(path)] == path})
    tree[path[-1]] = _expanded(given, path[0], value) if len(path) == 1 else value


def _expanded(given: Given, name: str, value: Any) -> Any:
    """Return the section that a shorthand such as `model: qwen3-0.6b` means, or `value` if it is not a shorthand.

    The line of the shorthand is recorded for the key that it means.
    """
    field = Job.model_fields.get(name)
    section = keys.expand(field, value) if field else value
    if section is not value:
        for inner in section:
            given.lines[name, inner] = given.lines[name,]
    return section


def _apply(given: Given, override: str) -> None:
    """Apply an override such as `optimizer.lr=8e-5`. Raise UserError if it is malformed."""
    key, equals, text = override.partition("=")
    names = tuple(key.split("."))
    if not equals or not all(names):
        raise UserError(
            "E-JOB-002",
            f"'{override}' is not an override",
            why="arguments after the job file must have the form key=value",
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
            why = f"{COMMAND_LINE}: {section} is a value, not a section"
            raise UserError("E-JOB-003", f"unknown key '{key}'", why=why, fix=f"write {section}={text}")
    for known in [path for path in given.lines if path[: len(names)] == names]:
        del given.lines[known]
    given.lines.update(dict.fromkeys(_places(names, value)))
    target[names[-1]] = _expanded(given, names[0], value) if len(names) == 1 else value


def _places(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """Yield the paths of a key and of all keys in its value."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _places((*path, name), inner)


def _make_paths_absolute(given: Given) -> None:
    """Make local paths absolute.

    A path in the file is relative to the file's folder. A path on the command line is relative to the current folder.
    """
    for path in path_keys(given.tree):
        tree = _section(given.tree, path[:-1])
        value = tree.get(path[-1]) if isinstance(tree, dict) else None
        if not isinstance(value, str) or not value or Address.of(value).is_remote or value == _NO_PATH.get(path):
            continue
        folder = Path() if given.on_command_line(path) else given.file.parent
        absolute = os.path.abspath(folder / os.path.expanduser(value))
        if path in (("model", "name"), ("distil", "teacher")):
            is_path = _is_model_folder(value, absolute)
        else:
            is_path = path != ("data", "tokenizer") or _is_tokenizer_path(value, absolute)
        if is_path:
            tree[path[-1]] = absolute


def with_absolute_paths(job: Job) -> Job:
    """Return the job with its relative paths made absolute, as seen from the working directory."""
    given = Given(job.model_dump(), {(name,): None for name in Job.model_fields}, Path())
    _make_paths_absolute(given)
    return job if given.tree == job.model_dump() else Job.model_validate(given.tree)


def path_keys(tree: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the keys whose values are paths. A part of a mixture may be a section or only its path."""
    yield from (("data", name) for name in ("path", "tokenizer", "chat_template", "store"))
    yield "model", "name"
    yield "lora", "start"
    yield from (("distil", name) for name in ("teacher", "cache"))
    mixture = _section(tree, ("data", "mixture"))
    for name, part in mixture.items() if isinstance(mixture, dict) else ():
        yield ("data", "mixture", name, "path") if isinstance(part, dict) else ("data", "mixture", name)


def _section(tree: Any, path: Sequence[str]) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _is_model_folder(value: str, path: str) -> bool:
    """Return whether a model name is a folder: `./x`, `~/x`, `/x`, or a path with a checkpoint in it.

    Any other name of the form `owner/name` is a repository on the hub.
    """
    written = value.startswith(("./", "../", "~", "/"))
    return written or ("/" in value and os.path.exists(os.path.join(path, "config.json")))


def _is_tokenizer_path(value: str, path: str) -> bool:
    """Return whether a tokenizer is a path: `./x`, `~/x`, `/x`, a .json file, a name without a slash, or it exists.

    Any other name of the form `owner/name` or `owner/name@revision` is a repository on the hub.
    """
    name = value.partition("@")[0]
    written = value.startswith(("./", "../", "~", "/")) or name.endswith(".json") or name.count("/") != 1
    return written or os.path.exists(path)
