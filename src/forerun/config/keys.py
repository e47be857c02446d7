"""The keys of a job as a flat table: each key path, such as `optimizer.lr`, with its field and its texts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from forerun.config.schema import Job
from forerun.config.section import Section


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section type of a field, also of an optional one, or None if the field is not a section."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


@cache
def fields() -> dict[str, FieldInfo]:
    """Return the fields of a job by key path, sections included, in the order of the schema."""
    return dict(_walk(Job, ""))


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner = section_of(field)
        if inner:
            yield from _walk(inner, f"{prefix}{name}.")


def leaf_keys() -> list[str]:
    """Return the key paths of values. Sections, such as `model.rope_scaling`, are replaced by their keys."""
    return [key for key, field in fields().items() if section_of(field) is None]


def siblings(section_key: str) -> list[str]:
    """Return the names of the keys in a section. The section "" is the job itself."""
    if not section_key:
        return list(Job.model_fields)
    field = fields().get(section_key)
    inner = section_of(field) if field else None
    return list(inner.model_fields) if inner else []


def reason(key: str) -> str:
    """Return the reason for the default of a key, or "" if it has none."""
    field = fields().get(key)
    extra = field.json_schema_extra if field else None
    return str(extra["reason"]) if isinstance(extra, dict) and "reason" in extra else ""


def field_at(key: str) -> FieldInfo | None:
    """Return the field of a key path, or None if there is none.

    In a table of sections, any name is allowed, as in data.mixture.NAME.path.
    """
    section: type[Section] | None = Job
    field: FieldInfo | None = None
    steps = iter(key.split("."))
    for step in steps:
        field = section.model_fields.get(step) if section else None
        if field is None:
            return None
        section = section_of(field)
        if section is None and get_origin(field.annotation) is dict:
            section = _section_in(get_args(field.annotation)[1])
            if next(steps, None) is not None:
                field = None  # the name of an entry is not a field
    return field


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the section of an annotation that may be `Annotated`."""
    kind = get_args(annotation)[0] if get_args(annotation) else annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def meaning(key: str) -> str:
    """Return the description of a key, or the first line of its section's docstring. Return "" for an unknown key."""
    field = field_at(key)
    if field is None:
        return ""
    inner = section_of(field)
    return field.description or ((inner.__doc__ or "").split("\n")[0].rstrip(".") if inner else "")


def shorthands() -> dict[str, str]:
    """Return the sections that may be written as a plain text, with the key that the text means: model -> name."""
    found: dict[str, str] = {}
    for name, field in Job.model_fields.items():
        expanded = expand(field, "text")
        if isinstance(expanded, dict):
            found[name] = next(iter(expanded))
    return found


def expand(field: FieldInfo, value: Any) -> Any:
    """Return `{name: qwen3-0.6b}` for `qwen3-0.6b` if the field has a shorthand, else the value itself."""
    if section_of(field) and isinstance(value, str):
        for extra in field.metadata:
            if isinstance(extra, BeforeValidator):
                value = extra.func(value)  # type: ignore[call-arg]
    return value
