"""The devices of a run: their choice, the mesh and the Program on them, and what the user reads about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from forerun.errors import UserError, first_line
from forerun.hardware import mesh
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.devices import DeviceChoice, choose
from forerun.hardware.slices import slice_count, slice_of_devices
from forerun.methods.method import parameter_count, trainable_count
from forerun.methods.qat import rounding_messages
from forerun.methods.requirements import eight_bit_note
from forerun.planner.compile.compiler import CompilerFailure
from forerun.planner.compile.fit_result import UnrollChoice
from forerun.planner.compile.request import CompileRequest
from forerun.planner.compile.result_cache import cached_fit_result
from forerun.program.build import Program, program_of
from forerun.program.kernels import compute_capability, job_attention
from forerun.reporter import SILENT, Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.supervise.worker import Worker
from forerun.units import Count


def choose_devices(resolved: ResolvedJob, reporter: Reporter, worker: Worker) -> DeviceChoice:
    """Return the devices of the run, and report them.

    Raises:
      UserError: there are no such devices, or the job's mesh is impossible on them.
    """
    chosen = replace(choose(resolved.job.device, resolved.job.devices), slices=worker.slices)
    reporter.info(f"device: {chosen.reason}")
    _report_slices(resolved, worker, reporter)
    if chosen.warning:
        reporter.warn(chosen.warning)
    mesh_on(resolved, chosen)
    return chosen


def session_slices(resolved: ResolvedJob, worker: Worker) -> dict[str, Any]:
    """Return the values of the `start` event about slices. Empty for a run whose supervisors do not count slices."""
    return {} if worker.slices is None else {"slices": worker.slices, "of_slices": resolved.job.mesh.slices}


def _report_slices(resolved: ResolvedJob, worker: Worker, reporter: Reporter) -> None:
    """Warn if fewer slices take part than the job has, or if `mesh.min_slices` has no effect."""
    axes = resolved.job.mesh
    if axes.min_slices is None:
        return
    if worker.slices is None:
        reporter.warn("mesh.min_slices has no effect: one process runs all slices, so none of them can be lost alone")
    elif worker.slices != axes.slices:
        reporter.warn(f"{worker.slices} of {axes.slices} slices take part; each computes more rows of the same batch")


def mesh_on(resolved: ResolvedJob, chosen: DeviceChoice) -> mesh.MeshShape:
    """Return the mesh of the job on the chosen devices. Raise a UserError if it is impossible."""
    axes, devices = resolved.job.mesh, len(chosen.devices)
    slices = mesh.slices_of(
        chosen.slices or axes.slices,
        slice_count(chosen.devices),
        chosen.platform,
        resolved.job.devices,
        "this machine",
        axes.min_slices,
    )
    return mesh.resolve(axes.data, axes.fsdp, axes.tp, devices, slices=slices, context=axes.context, expert=axes.expert)


def program_on(resolved: ResolvedJob, chosen: DeviceChoice, rows: int | None, reporter: Reporter = SILENT) -> Program:
    """Return the Program on the chosen devices.

    Args:
      resolved: the job.
      chosen: the devices.
      rows: the number of rows of an epoch, or None if it is unknown.
      reporter: receives a line about each value that was chosen for the devices.
    """
    resolved = with_unroll_chosen(resolved, chosen, reporter)
    return program_of(resolved, mesh_on(resolved, chosen), chosen.devices, rows)


def report_program(resolved: ResolvedJob, program: Program, chosen: DeviceChoice, reporter: Reporter) -> None:
    """Report the size of the program, its kernels, and weights that are rounded."""
    reporter.info(program_line(resolved, program))
    if (kernel := attention_note(resolved, chosen)) is not None:
        reporter.info(kernel)
    if (note := eight_bit_note(resolved, program.eight_bits)) is not None:
        reporter.info(note)
    for text, is_warning in rounding_messages(resolved):
        (reporter.warn if is_warning else reporter.info)(text)


def program_line(resolved: ResolvedJob, program: Program) -> str:
    """Return a line for the user about the program: parameters, mesh, steps, kernel, remat."""
    derived, parameters, trainable = program.derived, parameter_count(resolved), trainable_count(resolved)
    share = "" if trainable == parameters else f", {Count(trainable)} of them trainable"
    return (
        f"program: {Count(parameters)} parameters{share}, mesh {derived.mesh}, "
        f"{derived.steps} steps of {Count(derived.tokens_per_step)} tokens "
        f"({derived.micro_batch} x {derived.accumulation} x {derived.mesh.data_parallel} sequences), "
        f"attention {program.compute.attention.name}, remat {program.compute.remat.policy}"
    )


def attention_note(resolved: ResolvedJob, chosen: DeviceChoice) -> str | None:
    """Return a line about the attention kernel on GPUs, and wherever the fastest kernel cannot run; otherwise None."""
    first = chosen.devices[0]
    if resolved.model.heads is None:
        return None
    capability = compute_capability(first)
    choice = job_attention(resolved, resolved.model, first.platform, first.device_kind, capability)
    if capability is None and not choice.obstacle:
        return None
    return f"attention: {choice.kernel.name}{f', because {choice.obstacle}' if choice.obstacle else ''}"


def peak_flops(chosen: DeviceChoice) -> float | None:
    """Return the peak FLOP/s of all devices, or None for an unknown chip."""
    chip = chip_of_device_kind(chosen.devices[0].device_kind)
    if chip is None or chip.bf16_flops_per_device is None:
        return None
    return chip.bf16_flops_per_device * len(chosen.devices)


def local_devices(chosen: DeviceChoice) -> list[jax.Device]:
    """Return the chosen devices that are attached to this host."""
    return [device for device in chosen.devices if device.process_index == jax.process_index()]


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
