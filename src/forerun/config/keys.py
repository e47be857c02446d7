"""The job's keys as a flat table: `optimizer.lr` and its field, its section, its reason."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from forerun.config.schema import Job
from forerun.config.section import Section


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, also behind `| None`."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


@cache
def fields() -> dict[str, FieldInfo]:
    """Every key path of a job, sections included, in the order of the schema."""
    return dict(_walk(Job, ""))


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner = section_of(field)
        if inner:
            yield from _walk(inner, f"{prefix}{name}.")


def leaf_keys() -> list[str]:
    """The key paths that hold a value; `model.rope_scaling` counts as its keys."""
    return [key for key, field in fields().items() if section_of(field) is None]


def siblings(section_key: str) -> list[str]:
    """The names inside a section; the empty key is the job itself."""
    if not section_key:
        return list(Job.model_fields)
    field = fields().get(section_key)
    inner = section_of(field) if field else None
    return list(inner.model_fields) if inner else []


def reason(key: str) -> str:
    """Why the default of a key is what it is."""
    field = fields().get(key)
    extra = field.json_schema_extra if field else None
    return str(extra["reason"]) if isinstance(extra, dict) and "reason" in extra else ""


def meaning(key: str) -> str:
    """What a key is: its description, or the first line about its section."""
    field = fields()[key]
    inner = section_of(field)
    return field.description or ((inner.__doc__ or "").split("\n")[0].rstrip(".") if inner else "")


def shorthands() -> dict[str, str]:
    """Sections that a plain text may stand for, and the key it then means: model -> name."""
    found: dict[str, str] = {}
    for name, field in Job.model_fields.items():
        expanded = expand(field, "text")
        if isinstance(expanded, dict):
            found[name] = next(iter(expanded))
    return found


def expand(field: FieldInfo, value: Any) -> Any:
    """`qwen3-0.6b` as `{name: qwen3-0.6b}` where the field has a shorthand, else the value itself."""
    if section_of(field) and isinstance(value, str):
        for extra in field.metadata:
            if isinstance(extra, BeforeValidator):
                value = extra.func(value)  # type: ignore[call-arg]
    return value
