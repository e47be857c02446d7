"""How runs differ: their programs from the planned ones, and their jobs from the defaults and from each other.

`train` writes the facts about its program to program.json. `plan` computes the same hash for the same job, devices and
versions.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticUndefined

from forerun.config.load import origins_of, values
from forerun.config.schema import Job
from forerun.config.section import Section
from forerun.files import atomic_write
from forerun.hardware.chips import chip_of_device_kind
from forerun.reporter import Reporter
from forerun.run_folder.run_folder import RunFolder
from forerun.version import __version__

if TYPE_CHECKING:  # the agent on the hosts of a cloud run does not need them
    from forerun.program.build import Program
    from forerun.resolve.resolved_job import ResolvedJob


MISSING = "–"
PACKAGES = ("jax", "jaxlib", "libtpu", "optax")
UNEXPLAINED = "versions, devices, mesh and job agree: an environment variable of jax, a plugin or edited code differs"


@dataclass(frozen=True)
class ProgramFacts:
    """A program's hash and what it depends on. Values that are not known are empty.

    Attributes:
      device: the chip, such as `v6e`, or jax's name of another device.
      devices: the number of devices.
      job: the values of the resolved job as texts, by their key.
    """

    program: str
    device: str = ""
    devices: int | None = None
    mesh: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    job: Mapping[str, str] = field(default_factory=dict)


def installed_versions() -> dict[str, str]:
    """Return the versions on which the program depends. Packages that are not installed are omitted."""
    versions = {"forerun": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def program_facts(resolved: ResolvedJob, program: Program, devices: Sequence[Any], hash: str) -> ProgramFacts:
    """Return the facts about a program that was compiled for `devices`."""
    kind = devices[0].device_kind
    chip = chip_of_device_kind(kind)
    return ProgramFacts(
        program=hash,
        device=chip.name if chip is not None else kind,
        devices=len(devices),
        mesh=str(program.derived.mesh),
        versions=installed_versions(),
        job={key: value_text(value) for key, value in values(resolved.job).items()},
    )


def write_program_facts(folder: RunFolder, facts: ProgramFacts, reporter: Reporter) -> None:
    """Write program.json. Training does not depend on it, so a failure is only reported."""
    try:
        atomic_write(folder.program, json.dumps(asdict(facts), indent=1) + "\n")
    except OSError as error:
        reporter.warn(f"{folder.program} was not written: {error}")


def program_of_run(run: Path) -> ProgramFacts | None:
    """Return the facts in a run's program.json, or None if the run has not compiled yet."""
    try:
        content: dict[str, Any] = json.loads(RunFolder(run).program.read_bytes())
        return ProgramFacts(**{name: content[name] for name in ProgramFacts.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def program_differences(planned: ProgramFacts, trained: ProgramFacts) -> list[str]:
    """Return why two programs differ, one reason per line; an empty list if they are equal.

    A reason is a difference in versions, device, mesh or job. Facts that one side does not know are not compared.
    """
    if planned.program == trained.program:
        return []
    reasons = [
        f"{name} {trained.versions[name]}, planned with {version}"
        for name, version in planned.versions.items()
        if not f"{trained.versions.get(name, version)}.".startswith(f"{version}.")  # 3.11 was planned, 3.11.9 runs
    ]
    for what, before, now in (
        ("device", planned.device, trained.device),
        ("devices", planned.devices, trained.devices),
        ("mesh", planned.mesh, trained.mesh),
    ):
        if before and now and before != now:
            reasons.append(f"{what} {now}, planned for {before}")
    if planned.job and trained.job:
        keys = [key for key in {**planned.job, **trained.job} if planned.job.get(key) != trained.job.get(key)]
        reasons += [f"{key}: {trained.job.get(key, 'none')}, planned {planned.job.get(key, 'none')}" for key in keys]
    return reasons or [UNEXPLAINED]


# ---- Values of jobs ----


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
