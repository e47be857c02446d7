"""`program.json` of a run: the hash of its compiled program, and what the hash depends on.

`plan` computes the same hash for the same job, devices and versions. See `forerun.report.program_differences`.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from forerun.config.load import values
from forerun.files import atomic_write
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.devices import DeviceChoice
from forerun.program.build import Program
from forerun.report.job_differences import value_text
from forerun.reporter import Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.run_folder import RunFolder
from forerun.version import __version__

PACKAGES = ("jax", "jaxlib", "libtpu", "optax")


def installed_versions() -> dict[str, str]:
    """Return the versions on which the program depends. Packages that are not installed are omitted."""
    found = {"forerun": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def program_record(resolved: ResolvedJob, program: Program, chosen: DeviceChoice, hash: str) -> dict[str, Any]:
    """Return the content of program.json."""
    kind = chosen.devices[0].device_kind
    chip = chip_of_device_kind(kind)
    return {
        "program": hash,
        "device": chip.name if chip is not None else kind,
        "devices": len(chosen.devices),
        "mesh": str(program.derived.mesh),
        "versions": installed_versions(),
        "job": {key: value_text(value) for key, value in values(resolved.job).items()},
    }


def write_program_record(folder: RunFolder, record: dict[str, Any], reporter: Reporter) -> None:
    """Write program.json. Training does not depend on it, so a failure is only reported."""
    try:
        atomic_write(folder.program, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        reporter.warn(f"{folder.program} was not written: {error}")
