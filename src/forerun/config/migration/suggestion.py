"""What to write instead of a key of another trainer, in a job file or on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.config import keys
from forerun.config.migration.conversion import Conversion, ForeignValues, nested, number_in
from forerun.config.migration.registry import convert_value, foreign_key, leaves, surroundings
from forerun.config.source import flow, read_value


@dataclass(frozen=True)
class Suggestion:
    """The fix for a key of another trainer, and the keys of a job that it means."""

    fix: str
    meant: tuple[str, ...]


def suggestion(path: str, value: Any, tree: Mapping[str, Any], *, on_command_line: bool) -> Suggestion | None:
    """Return what to write instead of an unknown key, or None if no other trainer has it.

    Args:
      path: the dotted name of the key. Its value may be a section of another trainer, such as `training`.
      value: its value.
      tree: the complete job, because the batch may depend on several keys.
      on_command_line: whether to write overrides instead of lines of a file.
    """
    given = surroundings(tree)
    if not isinstance(value, dict) or foreign_key(path) is not None:
        found = convert_value(path, value, given)
        key = foreign_key(path)
        return None if found is None or key is None else _of_key(found, key.key, on_command_line)
    parts = [(name, convert_value(name, inner, given)) for name, inner in leaves(value, f"{path}.")]
    settings = {key: inner for _, part in parts if part for key, inner in part.settings.items()}
    if not any(part for _, part in parts):
        return None
    others = [
        f"{name}: {part.note if part else 'no key here'}" for name, part in parts if not part or not part.settings
    ]
    if not settings:
        return Suggestion(f"remove it: {'; '.join(others)}", ())
    rest = f"; {'; '.join(others)}" if others else ""
    return Suggestion(f"write {_lines(settings, on_command_line)}{rest}", tuple(settings))


def _of_key(found: Conversion, key: str, on_command_line: bool) -> Suggestion:
    note = f"; {found.note}" if found.note else ""
    if found.settings:
        lost = f"; not converted: {found.lost}" if found.lost else ""
        named = " and ".join(f"'{_shown_key(name)}'" for name in found.settings)
        fix = f"did you mean {named}? write {_lines(found.settings, on_command_line)}{note}{lost}"
        return Suggestion(fix, tuple(found.settings))
    if found.outcome == "unneeded" or key not in keys.fields():
        return Suggestion(f"remove it: {found.note}", (key,) if key in keys.fields() else ())
    return Suggestion(f"did you mean '{key}'? {found.note}", (key,))


def _shown_key(key: str) -> str:
    """Return `model` for `model.name`, as a job is usually written."""
    return "model" if key == "model.name" else key


def _lines(settings: Mapping[str, Any], on_command_line: bool) -> str:
    """Return settings as quoted lines of a job file, or as quoted overrides."""
    if on_command_line:
        return " ".join(_quoted(f"{key}={flow(value)}") for key, value in settings.items())
    return " and ".join(map(_quoted, file_lines(settings)))


def _quoted(text: str) -> str:
    return f"`{text}`" if "'" in text else f"'{text}'"


def file_lines(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as lines of a job file, one for each section."""
    short = keys.shorthands()
    lines = []
    for name, value in nested(settings).items():
        is_short = isinstance(value, dict) and list(value) == [short.get(name)] and isinstance(value[short[name]], str)
        lines.append(f"{name}: {flow(value[short[name]] if is_short else value)}")
    return lines


def overrides(name: str, text: str) -> str | None:
    """Return the overrides that an option of another trainer means, such as `batch=4 micro_batch=4`, or None.

    Args:
      name: the option, such as `learning_rate`.
      text: its value as written, or "" for a switch.
    """
    key = foreign_key(name)
    value = read_value(text, f"--{name}") if text else True
    found = convert_value(name, value, ForeignValues({name: value})) if key else None
    if key is None or found is None:
        return None
    if not found.settings:
        return f"{key.key}={text or '...'}" if key.key in keys.fields() else None
    # A number is repeated as the user wrote it: 3e-4, not 0.0003.
    return " ".join(
        f"{one}={text if text and number_in(value) == inner and not isinstance(inner, bool) else flow(inner)}"
        for one, inner in found.settings.items()
    )
