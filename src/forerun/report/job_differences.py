"""How jobs differ: from the defaults of the schema, and from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import PydanticUndefined

from forerun.config.load import origins_of, values
from forerun.config.schema import Job
from forerun.config.section import Section

MISSING = "–"


def value_text(value: Any) -> str:
    """Return a value of a job as a short text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or "none"
    return str(value)


def differences_from_defaults(job: Job) -> list[tuple[str, str, str]]:
    """Return (key, value, default) of each value of a job that is not its default, except its name.

    The default of a required key is a dash.
    """
    all_values, origins = values(job), origins_of(job)
    changed = [
        key for key, origin in origins.items() if origin.kind != "default" and key in all_values and key != "name"
    ]
    return [(key, value_text(all_values[key]), default_text(job, key)) for key in changed]


def default_text(job: Job, key: str) -> str:
    """Return the default of a key such as `optimizer.lr`, or a dash if the key is required."""
    section: Any = job
    *parents, last = key.split(".")
    for name in parents:
        section = getattr(section, name, None)
    if not isinstance(section, Section) or last not in type(section).model_fields:
        return MISSING
    default = type(section).model_fields[last].get_default(call_default_factory=False)
    return MISSING if default is PydanticUndefined or isinstance(default, Section) else value_text(default)


def differing_keys(jobs: Sequence[Job]) -> list[tuple[str, list[str]]]:
    """Return (key, value of each job) for the keys whose values differ between the jobs.

    Names and folders of the runs always differ and are omitted. A key that a job does not have has a dash.
    """
    tables = [values(job) for job in jobs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    rows = [(key, [value_text(table[key]) if key in table else MISSING for table in tables]) for key in keys]
    return [(key, texts) for key, texts in rows if len(set(texts)) > 1 and key not in ("name", "runs")]
