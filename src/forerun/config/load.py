"""A job file and `a.b=c` overrides become one checked Job, and every value knows where it came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from forerun.config import given, keys
from forerun.config.mistakes import user_error
from forerun.config.schema import Job
from forerun.config.section import Section
from forerun.config.source import Dumper, KeyPath
from forerun.safe_text import redacted_tree


@dataclass(frozen=True)
class Origin:
    """Who set a value: `where` is job.yaml:7, command line or default."""

    kind: Literal["default", "file", "override"]
    where: str


@dataclass(frozen=True)
class Loaded:
    """A job, the origin of every leaf key such as `optimizer.lr`, and the file it came from."""

    job: Job
    origins: dict[str, Origin]
    path: Path


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a job file, applies the overrides from left to right, and checks the whole.

    An override replaces what stands at its key: `remat=none` drops a whole `remat:` section,
    `remat.policy=none` one line of it.

    Raises:
      UserError: names every mistake with its file and line.
    """
    path = Path(path)
    read = given.read(path, overrides)
    try:
        job = Job.model_validate({"name": _default_name(path), **read.tree})
    except ValidationError as error:
        raise user_error(error, read) from None
    return Loaded(job, {_dotted(leaf): _origin(leaf, read) for leaf, _ in _leaves((), job)}, path)


def _default_name(path: Path) -> str:
    """The file's name, or its folder's if the file is just called `job`; made fit for a folder under runs/."""
    name = path.resolve().parent.name if path.stem == "job" else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".") or "job"


def _origin(path: KeyPath, read: given.Given) -> Origin:
    if path not in read.lines:
        return Origin("default", "default")
    line = read.lines[path]
    return Origin("override", given.COMMAND_LINE) if line is None else Origin("file", f"{read.file.name}:{line}")


def values(job: Job) -> dict[str, Any]:
    """Return every leaf of a job under its key path in `Loaded.origins`, redacted, for display and comparison."""
    return {_dotted(path): redacted_tree(value) for path, value in _leaves((), job)}


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Section):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves((*path, name), inner)
    else:
        yield path, value


def dump(job: Job, *, defaults: bool = True) -> str:
    """Return the complete job as YAML; without `defaults`, only what differs from them.

    Loading it gives an equal job, except that the queries of URLs are redacted: the text is stored and published.
    """
    content = redacted_tree(job.model_dump(exclude_defaults=not defaults))
    return str(yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1_000_000))


def json_schema() -> dict[str, Any]:
    """JSON Schema of a job file, for editors: completion, the meaning of keys, red lines under mistakes."""
    schema = Job.model_json_schema()
    for name in keys.shorthands():
        section = schema["properties"][name]
        default = {"default": section.pop("default")} if "default" in section else {}
        schema["properties"][name] = {"anyOf": [{"type": "string"}, section], **default}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "forerun job"}
