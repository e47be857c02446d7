"""Validation errors of a job as one user error, with the file, the line and a fix for each mistake."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from forerun.config import keys
from forerun.config.merge import Given
from forerun.config.source import BEGIN, KeyPath, flow
from forerun.errors import JobValueError, UserError, did_you_mean
from forerun.safe_text import redact

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from forerun.config.migration.suggestion import Suggestion

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_short": "a list with an entry",
}
_LIMITS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
MANY_FOREIGN_KEYS = 4
# Keys of earlier versions, and what changed.
REMOVED = {"data.begin": "data is tokenized before the first step"}
_EXAMPLES = {"model": "Qwen/Qwen3-0.6B", "data": "path/of/texts", "data.path": "path/of/texts"}


@dataclass(frozen=True)
class Mistake:
    """One mistake in a job.

    Args:
      why: the reason, without the file and the line, which `user_error` adds.
      path: the key that is wrong.
      meant: the known keys that an unknown key probably means.
      missing: the missing key, if the mistake is a missing key. It is not reported if an unknown key means it.
      is_foreign: whether the unknown key is one of another trainer.
    """

    code: str
    what: str
    why: str
    fix: str
    path: KeyPath
    meant: tuple[str, ...] = ()
    missing: str | None = None
    is_foreign: bool = False


def user_error(error: ValidationError, given: Given) -> UserError:
    """Return one error with all mistakes of a job, in the order of the file."""
    found = list(_mistakes(error.errors(include_url=False), given))
    meant = {part for mistake in found for key in mistake.meant for part in (key, key.partition(".")[0])}
    found = [mistake for mistake in found if mistake.missing not in meant]
    found.sort(key=lambda mistake: _line(mistake.path, given))
    if len(found) == 1:
        only = found[0]
        return UserError(only.code, only.what, why=f"{given.place(only.path)} {only.why}", fix=only.fix)
    in_file = [mistake for mistake in found if not given.on_command_line(mistake.path)]
    convert = f"; or convert it: forerun convert {given.file} > new.yaml" if _is_foreign_file(in_file) else ""
    begin = f"; {BEGIN}" if {"model", "data"} <= {mistake.missing for mistake in found} else ""
    return UserError(
        "E-JOB-004",
        f"{len(found)} mistakes in the job",
        why="\n".join(f"{given.place(m.path)}: {m.what} [{m.code}]; {m.fix}" for m in found),
        fix=f"fix them, then run: forerun check {given.file}{convert}{begin}",
    )


def _is_foreign_file(found: Sequence[Mistake]) -> bool:
    """Return whether the file was probably written for another trainer, because it has several of its keys."""
    return sum(mistake.is_foreign for mistake in found) >= MANY_FOREIGN_KEYS


def _line(path: KeyPath, given: Given) -> float:
    """Return the line of a key in the file, or infinity for a key of the command line."""
    _, _, line = given.place(path).rpartition(":")
    return int(line) if line.isdigit() else float("inf")


def _mistakes(errors: Iterable[ErrorDetails], given: Given) -> Iterator[Mistake]:
    """Yield a mistake for each of pydantic's errors. The errors of all alternatives of a union are one mistake."""
    alternatives: dict[KeyPath, list[tuple[KeyPath, ErrorDetails]]] = {}
    for details in errors:
        path, union = _path(details, given.tree)
        if union is not None:
            alternatives.setdefault(union, []).append((path, details))
        elif details["type"] == "extra_forbidden":
            yield _unknown(path, given)
        elif details["type"] == "missing":
            yield _missing(path)
        elif details["type"] == "value_error":
            yield _rejected(path, details["ctx"]["error"], given)
        else:
            yield _wrong(path, [details], given)
    for tried in alternatives.values():
        deepest = max((path for path, _ in tried), key=len)
        yield _wrong(deepest, [details for path, details in tried if path == deepest], given)


def _path(details: ErrorDetails, tree: Any) -> tuple[KeyPath, KeyPath | None]:
    """Return the key path of an error, and the path of the union whose alternatives pydantic tried, or None."""
    path: KeyPath = ()
    union: KeyPath | None = None
    for step in details["loc"]:
        if isinstance(tree, dict) and step in tree:
            path, tree = (*path, step), tree[str(step)]
        elif isinstance(tree, list) and isinstance(step, int):
            path, tree = (*path, step), tree[step]
        elif details["type"] == "missing":
            path = (*path, step)
        elif union is None:
            union = path
    return path, union


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _unknown(path: KeyPath, given: Given) -> Mistake:
    section, name, key = _dotted(path[:-1]), str(path[-1]), _dotted(path)
    known = keys.siblings(section)
    near = _near(section, name, known)
    found = _foreign(path, given, near)
    meant: tuple[str, ...] = ()
    why = f"has it, but {section or 'a job'} has no '{name}'"
    if key in REMOVED:
        why, fix, found = f"has it, but it was removed: {REMOVED[key]}", "remove the key", None
    elif found is not None:
        fix, meant = found.fix, found.meant
    elif near:
        fix, meant = f"did you mean '{near}'?", (near,)
    else:
        fix = f"remove it; known here: {', '.join(known)}"
    return Mistake(
        "E-JOB-018",
        f"unknown key '{key}'",
        why=why,
        fix=fix,
        path=path,
        meant=meant,
        is_foreign=found is not None,
    )


def _foreign(path: KeyPath, given: Given, near: str | None) -> Suggestion | None:
    """Return the suggestion for a key of another trainer, or None if it is not one, or also the name of a key here."""
    from forerun.config.migration.suggestion import suggestion  # needed for errors only

    value = _at(path, given.tree)
    if isinstance(value, dict) and near is not None and set(value) & set(keys.siblings(near)):
        return None  # a misspelt section
    found = suggestion(_dotted(path), value, given.tree, on_command_line=given.on_command_line(path))
    is_own = near is not None and near.rpartition(".")[2] == str(path[-1])
    return None if found is None or (is_own and near not in found.meant) else found


def _near(section: str, name: str, known: Sequence[str]) -> str | None:
    """Return the key that an unknown name probably means, or None: a similar name, or a key elsewhere."""
    prefix = f"{section}." if section else ""
    elsewhere = [key for key in keys.fields() if key != prefix + name]
    ends = {key.rpartition(".")[2]: key for key in reversed(elsewhere)}
    near = did_you_mean(name, known)
    if near and name not in ends:
        return prefix + near
    close = difflib.get_close_matches(name, ends, n=1, cutoff=0.8)
    return ends[close[0]] if close else None


def _missing(path: KeyPath) -> Mistake:
    key = _dotted(path)
    meaning = keys.meaning(key)
    return Mistake(
        "E-JOB-019",
        f"'{key}' is missing",
        why=f"does not set it{': ' if meaning else ''}{meaning}",
        fix=f"add it, for example: {path[-1]}: {_EXAMPLES.get(key, '...')}",
        path=path,
        missing=key,
    )


def _rejected(path: KeyPath, error: JobValueError, given: Given) -> Mistake:
    """Return the mistake that a validator reports. That of a section is placed at the keys that its texts name."""
    named = _named(path, str(error), given)
    others = [f"{given.place(other)} sets {_dotted(other)}" for other in named[1:]]
    why = ", ".join([f"sets {_dotted(named[0])}", *others]) if named else "as a whole"
    if error.why:
        why += f": {error.why}"
    return Mistake(error.code, error.what, why=why, fix=error.fix, path=named[0] if named else path)


def _named(path: KeyPath, message: str, given: Given) -> list[KeyPath]:
    """Return the keys that a message about the section at `path` names. Of nested keys, only the innermost counts.

    This finds the place of a mistake if the section is in the file and the wrong key comes from the command line.
    """
    if path and not isinstance(_at(path, given.tree), dict):
        return [path]
    found: list[KeyPath] = []
    for words in re.findall(r"\w+(?:\.\w+)*", message):
        key = tuple(words.split("."))
        for one in (key, (*path, *key)):
            if one[: len(path)] == path and one not in found and _has(one, given.tree):
                found.append(one)
    deepest = [one for one in found if not any(other[: len(one)] == one and other != one for other in found)]
    return deepest or ([path] if path else [])


def _has(path: KeyPath, tree: Any) -> bool:
    for step in path:
        if not isinstance(tree, dict) or step not in tree:
            return False
        tree = tree[str(step)]
    return bool(path)


def _wrong(path: KeyPath, errors: Sequence[ErrorDetails], given: Given) -> Mistake:
    key = _dotted(path)
    value = _at(path, given.tree)
    what = f"{key}: {_shown(value)} is not {' or '.join(map(_wanted, errors))}"
    field = keys.fields().get(key)
    meaning = keys.meaning(key) if field else ""
    why = f"sets {key}{f' ({meaning})' if meaning else ''}"
    return Mistake("E-JOB-020", what, why=why, fix=_fix(path, value, errors, given), path=path)


def _at(path: KeyPath, tree: Any) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def _wanted(details: ErrorDetails) -> str:
    if details["type"] == "literal_error":
        return _listed(_choices(details))
    if details["type"] in _LIMITS:
        bound, words = _LIMITS[details["type"]]
        return f"{words} {details['ctx'][bound]:g}"
    return _WANTED.get(details["type"], f"right ({details['msg']})")


def _choices(details: ErrorDetails) -> list[str]:
    return re.findall(r"'([^']*)'", str(details["ctx"]["expected"]))


def _listed(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a section of keys"
    text = redact(f"'{value}'" if isinstance(value, str) else flow(value))  # redact before the text is shortened
    return text if len(text) <= 60 else f"{text[:56]}...{text[-1]}"


def _fix(path: KeyPath, value: Any, errors: Sequence[ErrorDetails], given: Given) -> str:
    kinds = {details["type"] for details in errors}
    if "literal_error" in kinds:
        from forerun.config.migration.values import value_alias  # needed for errors only

        choices = [choice for details in errors if "expected" in details.get("ctx", {}) for choice in _choices(details)]
        alias = value_alias(_dotted([step for step in path if isinstance(step, str)]), value)
        near = alias if alias in choices else did_you_mean(str(value), choices)
        number = "a whole number from 1 or " if kinds & {"int_type", "int_from_float", "greater_than"} else ""
        return f"did you mean '{near}'?" if near else f"write {number}{_listed(choices)}"
    if kinds == {"string_type"} and value is not None and not isinstance(value, (dict, list)):
        quoted = f'"{flow(value)}"'
        return f"put it in quotes: {_written(path, quoted, given)}"
    if kinds <= {"int_type", "int_from_float"} and isinstance(value, float) and value.is_integer():
        return f"write {_written(path, str(int(value)), given)}"
    key = _dotted(path)
    field = keys.fields().get(key)
    if key in _EXAMPLES:
        return f"write for example {_written(path, _EXAMPLES[key], given)}"
    if field and keys.section_of(field):
        return f"remove it, or write keys below it: {', '.join(keys.siblings(key))}"
    if field is None or field.is_required() or field.default is None:
        if errors[0]["type"] in _LIMITS:
            return f"write a number that is {_wanted(errors[0])}"
        return f"write {_wanted(errors[0])}" if errors[0]["type"] in _WANTED else f"change {key}"
    return f"write for example {_written(path, flow(field.get_default(call_default_factory=True)), given)}"


def _written(path: KeyPath, text: str, given: Given) -> str:
    """Return a setting as the user would write it in that place: as a line of the file, or as an override."""
    if given.on_command_line(path):
        quoted = f"'{text}'" if '"' in text else text
        return f"{_dotted(path)}={quoted}"
    return f"{path[-1]}: {text}"
