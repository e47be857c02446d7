"""Load a job file with `a.b=c` overrides into a validated Job, and record the origin of each value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from forerun.config import keys, merge
from forerun.config.mistakes import user_error
from forerun.config.optimizer import changed_defaults
from forerun.config.schema import Job
from forerun.config.section import Section
from forerun.config.source import Dumper, KeyPath
from forerun.errors import UserError
from forerun.safe_text import redacted_tree

STAGES = "stages"  # the key of a file with several jobs, see `forerun.config.stages`
FILE_KEYS = ("name", "runs")  # keys that all stages of a file share
# Keys that only stages have, as JSON Schema.
STAGE_KEYS: dict[str, dict[str, Any]] = {
    "merge": {"type": "boolean", "description": "whether the next stage starts with merged adapters"},
    "result": {"enum": ["newest", "best"], "description": "the checkpoint that the next stage starts with"},
}


@dataclass(frozen=True)
class Origin:
    """The origin of a value. `where` is for the user: `job.yaml:7`, `command line` or `default`."""

    kind: Literal["default", "file", "override"]
    where: str


@dataclass(frozen=True)
class LoadedJob:
    """A job, the origin of each leaf key such as `optimizer.lr`, and the job file."""

    job: Job
    origins: dict[str, Origin]
    path: Path


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Read a job file, apply the overrides from left to right, and validate the result.

    An override replaces the value at its key. `remat=none` replaces the complete `remat` section, and
    `remat.policy=none` replaces one key in it.

    Args:
      path: the job file.
      overrides: texts of the form `a.b=c`.

    Raises:
      UserError: the file cannot be read, or the job is invalid. The error lists each mistake with its file and line.
    """
    read = merge.read(Path(path), overrides)
    if STAGES in read.tree:
        names = ", ".join(map(str, read.tree[STAGES] or ())) if isinstance(read.tree[STAGES], dict) else ""
        raise UserError(
            "E-JOB-110",
            f"{path} has stages, and one job is needed here",
            why=f"{read.place((STAGES,))} lists the stages {names}",
            fix="choose one with --stage NAME; in Python: forerun.load_stages(path)[name]",
        )
    return loaded_job(read)


def loaded_job(given: merge.Given) -> LoadedJob:
    """Validate the merged values of a job file.

    Raises:
      UserError: the job is invalid. The error lists each mistake with its file and line.
    """
    try:
        job = Job.model_validate({"name": default_name(given.file), **given.tree})
    except ValidationError as error:
        raise user_error(error, given) from None
    return LoadedJob(job, {_dotted(leaf): _origin(leaf, given) for leaf, _ in _leaves((), job)}, given.file)


def origins_of(job: Job) -> dict[str, Origin]:
    """Return the origins of a job that was created in Python: a value either differs from its default or does not."""
    changed = {_dotted(path) for path, _ in _branches((), job.model_dump(exclude_defaults=True))}
    own = changed_defaults(job.optimizer.name, job.optimizer.schedule)
    changed -= {f"optimizer.{key}" for key, (value, _) in own.items() if getattr(job.optimizer, key) == value}
    return {
        key: Origin("override", "set in Python") if key in changed else Origin("default", "default")
        for key in values(job)
    }


def default_name(path: Path) -> str:
    """Return a name for the run's folder: the name of the file, or that of its folder if the file is called `job`.

    Characters that are not safe in a folder name are replaced.
    """
    name = path.resolve().parent.name if path.stem == "job" else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".") or "job"


def _origin(path: KeyPath, read: merge.Given) -> Origin:
    if path not in read.lines:
        return Origin("default", "default")
    line = read.lines[path]
    return Origin("override", merge.COMMAND_LINE) if line is None else Origin("file", f"{read.file.name}:{line}")


def values(job: Job) -> dict[str, Any]:
    """Return the redacted value of each leaf key, for display and comparison. `LoadedJob.origins` has the same keys."""
    return {_dotted(path): redacted_tree(value) for path, value in _leaves((), job)}


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Section):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, tuple) and any(isinstance(one, Section) for one in value):
        value = [one.model_dump(exclude_defaults=True) for one in value]  # a list of sections is one value
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves((*path, name), inner)
    else:
        yield path, value


def _branches(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every key of nested dictionaries, sections included."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, name), inner
        yield from _branches((*path, name), inner)


def dump(job: Job, *, defaults: bool = True) -> str:
    """Return the job as YAML. Without `defaults`, keys with their default values are omitted.

    Loading the text gives an equal job, except that the queries of URLs are redacted, because the text is stored and
    published.
    """
    content = redacted_tree(job.model_dump(exclude_defaults=not defaults))
    return str(yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1_000_000))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file. Editors use it for completion, descriptions and validation."""
    schema = Job.model_json_schema()
    for name in keys.shorthands():
        section = schema["properties"][name]
        default = {"default": section.pop("default")} if "default" in section else {}
        schema["properties"][name] = {"anyOf": [{"type": "string"}, section], **default}
    stage = {name: value for name, value in schema["properties"].items() if name not in FILE_KEYS}
    schema["properties"][STAGES] = {
        "type": "object",
        "minProperties": 1,
        "description": "jobs that run one after the other, each from the result of the one before",
        "additionalProperties": {
            "type": "object",
            "properties": {**stage, **STAGE_KEYS},
            "additionalProperties": False,
        },
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "forerun job"}
