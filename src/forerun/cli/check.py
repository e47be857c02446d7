"""`forerun check`: every value of a job, where it came from, and what follows from it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.config.load import Loaded
    from forerun.config.schema import Job

_WIDEST_VALUE = 28
_DIM, _PLAIN = "\033[2m", "\033[0m"


class Row(NamedTuple):
    name: str
    value: str
    origin: str
    default: bool = False


def run(args: argparse.Namespace) -> int:
    from forerun.config.load import load

    loaded = load(args.job, args.overrides)
    on_slice = _devices_on(args.on, loaded.job) if args.on else None
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(table(job_groups(loaded), colour), flush=True)
    devices, title = on_slice or _devices_here(loaded.job)
    print(f"\nderived for {title}\n{table([_derived(loaded.job, devices)], colour)}")
    return 0


def job_groups(loaded: Loaded) -> list[list[Row]]:
    """The job's own values, then each section, in the order of the schema."""
    from forerun.config import keys
    from forerun.config.load import values
    from forerun.config.source import flow

    groups: dict[str, list[Row]] = {"": []}
    for key, value in values(loaded.job).items():
        section, dot, _ = key.partition(".")
        origin = loaded.origins[key]
        default = origin.kind == "default"
        where = f"default: {keys.reason(key)}" if default else origin.where
        groups.setdefault(section if dot else "", []).append(Row(key, flow(value), where, default))
    return list(groups.values())


def table(groups: list[list[Row]], colour: bool) -> str:
    """Aligned rows with an empty line between groups; defaults are dim where the terminal can show it."""
    rows = [row for group in groups for row in group]
    name_width = max(len(row.name) for row in rows)
    value_width = min(_WIDEST_VALUE, max(len(row.value) for row in rows))

    def line(row: Row) -> str:
        text = f"  {row.name:<{name_width}}  {row.value:<{value_width}}  {row.origin}"
        return f"{_DIM}{text}{_PLAIN}" if colour and row.default else text

    return "\n\n".join("\n".join(map(line, group)) for group in groups)


def _devices_on(name: str, job: Job) -> tuple[int, str]:
    from forerun.hardware.slices import slice_named

    there = slice_named(name).devices
    if job.devices is not None and job.devices > there:
        raise UserError(
            f"the job wants {job.devices} devices",
            why=f"{name} has {there}",
            fix=f"set devices={there}, or --on larger",
        )
    return job.devices or there, name


def _devices_here(job: Job) -> tuple[int, str]:
    from forerun.hardware.devices import choose

    chosen = choose(job.device, job.devices)
    if chosen.warning:
        print(f"warning: {chosen.warning}", file=sys.stderr)
    return len(chosen.devices), f"this machine: {chosen.reason}"


def _derived(job: Job, devices: int) -> list[Row]:
    from forerun.hardware.mesh import resolve
    from forerun.program.derive import derive

    mesh = resolve(job.mesh.data, job.mesh.fsdp, job.mesh.tp, devices)
    return [Row(*row) for row in derive(job, mesh, _examples(job)).rows()]


def _examples(job: Job) -> int | None:
    """Rows in an epoch; None if the data is elsewhere and the job has its number of steps without it."""
    from forerun.data.corpus import open_text
    from forerun.data.tokenizer import load_tokenizer

    if job.steps is not None and not Path(job.data.path).exists():
        print(f"warning: data.path {job.data.path} is not on this machine", file=sys.stderr)
        return None
    return len(open_text(job.data, sequence=job.sequence, tokenizer=load_tokenizer(job.data.tokenizer)))
