"""The text of a converted job: its keys in the order of the schema, with the origin of each value as a comment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from forerun.config import keys
from forerun.config.migration.acceptance import nested
from forerun.config.migration.converted_job import ConvertedJob
from forerun.config.source import flow
from forerun.safe_text import clean

WIDTH = 118
_SHORT = {"model": "name", "remat": "policy", "preferences": "loss", "distil": "teacher"}


def job_text(name: str, found: ConvertedJob, settings: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return a job file.

    Args:
      name: the name of the file that was converted.
      found: what could not be converted, and what is not needed.
      settings: the dotted keys of the job and their values.
      comments: the origin of each value.
    """
    order = list(keys.fields())
    ordered = sorted(settings, key=lambda key: _position(key, order))
    lines = [f"# Converted from {clean(name)} ({found.source}). A comment names the key that a value comes from."]
    for assumed in found.assumed:
        lines += _wrapped(f"Assumed: {assumed}", "# ")
    lines += _tree(nested({key: settings[key] for key in ordered}), comments, "", "")
    for title, listed in (("Not converted", found.not_converted), ("Not needed", _grouped(found.unneeded))):
        if listed:
            lines += ["", f"# {title}:"]
            for key, reason in listed.items():
                lines += _wrapped(f"{key}: {reason}", "#   ")
    return "\n".join(lines) + "\n"


def _position(key: str, order: list[str]) -> tuple[int, str]:
    """Return the place of a key in the schema. The names of columns and of sources are not in the schema."""
    parts = key.split(".")
    found = next(".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in order)
    return order.index(found), key


def _tree(tree: Mapping[str, Any], comments: Mapping[str, str], prefix: str, indent: str) -> Iterator[str]:
    """Yield the lines of nested sections."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and list(value) == [_SHORT.get(key)]:
            key, value = f"{key}.{_SHORT[key]}", value[_SHORT[key]]
        if isinstance(value, dict) and value and key not in comments:
            yield f"{indent}{name}:"
            yield from _tree(value, comments, f"{key}.", f"{indent}  ")
        else:
            comment = f"  # {clean(comments[key])}".replace("\n", " ") if key in comments else ""
            yield f"{indent}{flow(name)}: {flow(value)}{comment}"


def _grouped(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons with all keys that have the same one."""
    names: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        names.setdefault(reason, []).append(key)
    return {", ".join(listed): reason for reason, listed in names.items()}


def _wrapped(text: str, prefix: str) -> list[str]:
    line = clean(text).replace("\n", " ")
    return textwrap.wrap(line, WIDTH, initial_indent=prefix, subsequent_indent=f"{prefix}  ", break_long_words=False)
