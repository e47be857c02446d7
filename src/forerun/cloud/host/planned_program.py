"""The comparison of the compiled program with the one that was planned for the slice."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.cloud.record.entries import Option
from forerun.errors import UserError
from forerun.hardware.slices import slice_named
from forerun.report.program_differences import ProgramFacts, program_differences


def planned_program(option: Option, versions: Mapping[str, str]) -> ProgramFacts | None:
    """Return what is known about the planned program of an option, or None if no program was planned."""
    if not option.program:
        return None
    try:
        found = slice_named(option.slice)
    except UserError:  # a GPU machine
        return ProgramFacts(option.program, versions=versions)
    return ProgramFacts(option.program, found.chip.name, found.devices, versions=versions)


def program_note(planned: ProgramFacts, compiled: ProgramFacts | None) -> str:
    """Return how the compiled program differs from the planned one, or an empty string."""
    if compiled is None or compiled.program == planned.program:
        return ""
    reasons = "; ".join(program_differences(planned, compiled))
    return f"program {compiled.program} differs from the planned {planned.program}: {reasons}"
