"""`summary.json`: the results of a finished run."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.device_memory import PEAK
from forerun.hardware.devices import DeviceChoice
from forerun.methods.method import parameter_count, trainable_count
from forerun.program.build import Program
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.compile_step import CompiledStep
from forerun.run.throughput import Throughput
from forerun.run.validation import Validation
from forerun.run_folder.run_folder import RunFolder
from forerun.track.event_log import read_events
from forerun.track.metrics import read_metrics
from forerun.version import __version__


def loss_unit(counted: str) -> str:
    """Return the unit of the loss for an objective that counts tokens, pairs or something else."""
    return "nats per token" if counted == "tokens" else f"per {counted.removesuffix('s')}"


def summary_of(
    resolved: ResolvedJob,
    program: Program,
    step: CompiledStep,
    throughput: Throughput,
    validation: Validation,
    chosen: DeviceChoice,
    folder: RunFolder,
) -> dict[str, Any]:
    """Return the content of summary.json.

    The losses are those of the complete run. The times are those of this process, without its first step.
    """
    losses = [line["loss"] for line in read_metrics(folder.metrics) if "loss" in line]
    chip = chip_of_device_kind(chosen.devices[0].device_kind)
    times = throughput.step_seconds[1:] or throughput.step_seconds
    step_seconds = statistics.median(times) if times else None
    return {
        "name": resolved.job.name,
        "steps": throughput.step,
        "resumed_at": throughput.first,
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "validation": asdict(validation.best) if validation.best.step else None,
        "loss_unit": loss_unit(program.method.objective.unit),
        "tokens": throughput.step * program.derived.tokens_per_step,
        "parameters": parameter_count(resolved),
        "trainable_parameters": trainable_count(resolved),
        "step_seconds": step_seconds,
        "predicted_step_seconds": step.predicted_seconds(chip) if chip is not None else None,
        "tokens_per_second": throughput.tokens_per_second(step_seconds) if step_seconds else None,
        "samples_per_second": throughput.samples_per_second(step_seconds) if step_seconds else None,
        "mfu": throughput.mfu(step_seconds) if step_seconds else None,
        "epochs": throughput.epoch(),
        "epoch_seconds": throughput.epoch_seconds(step_seconds) if step_seconds else None,
        "hbm_peak_bytes": throughput.memory_bytes().get(PEAK),
        "wait_share": throughput.wait_share,
        "train_seconds": throughput.total_seconds,
        "program": step.hash,
        "compile_cached": step.cached,
        "mesh": str(program.derived.mesh),
        **({"slices": history} if (history := slice_history(read_events(folder.events))) else {}),
        "device": {
            "platform": chosen.platform,
            "kind": chosen.devices[0].device_kind,
            "chip": chip.name if chip else None,
            "count": len(chosen.devices),
        },
        "versions": {
            "forerun": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "jaxlib", "optax", "orbax-checkpoint")},
        },
    }


def slice_history(events: Iterable[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Return from which step on how many slices computed the steps that the run keeps.

    The `step` of an entry is that of the checkpoint from which they continued, 0 for the start. Steps that a later
    session computed again count for that session. A session without a `resume` line did not get as far as its state,
    except for the first one, which has none. The result is empty for a run that does not count slices.
    """
    found: list[dict[str, int]] = []
    slices: Any = None
    for event in events:
        if event.get("event") == "start":
            slices = event.get("slices")
        first = event.get("event") == "start" and event.get("session") == 1
        if not (first or event.get("event") == "resume") or type(slices) is not int:
            continue
        step = 0 if first else int(event.get("step", 0))
        while found and found[-1]["step"] >= step:
            found.pop()
        if not found or found[-1]["slices"] != slices:
            found.append({"step": step, "slices": slices})
    return found
