"""The value of `unroll: auto` on the devices of this run: the one that `plan` finds for the same slice."""

from __future__ import annotations

import jax

from forerun.errors import UserError, first_line
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.devices import DeviceChoice
from forerun.hardware.slices import slice_of_devices
from forerun.planner.compile.compiler import CompilerFailure
from forerun.planner.compile.request import CompileRequest
from forerun.planner.compile.result_cache import cached_fit_result
from forerun.planner.compile.unrolling import UnrollChoice
from forerun.reporter import SILENT, Reporter
from forerun.resolve.resolved_job import ResolvedJob


def with_unroll_chosen(resolved: ResolvedJob, chosen: DeviceChoice, reporter: Reporter = SILENT) -> ResolvedJob:
    """Return the job with a fixed value of `unroll`. For `auto`, report the value and the reason.

    For TPUs and GPUs, this compiles both programs in child processes, as `plan` does, and shares its cache. A child
    process does not use the devices, and ends before the compiler generates code.
    """
    if resolved.job.unroll != "auto":
        return resolved
    choice = unroll_choice(resolved, chosen)
    reporter.info(f"unroll (auto): {str(choice.unrolled).lower()}, because {choice.reason}")
    return resolved.with_values(unroll=choice.unrolled)


def unroll_choice(resolved: ResolvedJob, chosen: DeviceChoice) -> UnrollChoice:
    """Return the value for these devices, and why."""
    kind = chosen.devices[0].device_kind
    chip = chip_of_device_kind(kind)
    if chip is None:
        return UnrollChoice(False, f"plan has no compiler and no memory limit for {kind}")
    # A job with `devices` uses the first devices of a slice. The complete slice is compiled for, as in `plan`.
    attached = chosen.devices if resolved.job.devices is None else tuple(jax.devices(chosen.platform))
    try:
        choice = cached_fit_result(CompileRequest(resolved, slice_of_devices(chip, attached))).unroll
    except (UserError, CompilerFailure) as error:
        return UnrollChoice(False, f"the two programs could not be compared: {first_line(error)}")
    assert choice is not None
    return choice
