"""`summary.json`: what a finished run came to."""

from __future__ import annotations

import platform
import statistics
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import jax

from forerun import __version__
from forerun.config.schema import Job
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.devices import Chosen
from forerun.loop.compilation import CompiledStep
from forerun.loop.folder import RunFolder
from forerun.loop.pace import Pace
from forerun.loop.validation import Validation
from forerun.nn.spec import count
from forerun.program.build import Program
from forerun.track.metrics import read_metrics


def loss_unit(counted: str) -> str:
    """Of an objective that counts tokens, pairs or something else."""
    return "nats per token" if counted == "tokens" else f"per {counted.removesuffix('s')}"


def summary_of(
    job: Job,
    program: Program,
    step: CompiledStep,
    pace: Pace,
    validation: Validation,
    chosen: Chosen,
    folder: RunFolder,
) -> dict[str, Any]:
    """The loss is the whole run's; the times are this process's, without its first step."""
    losses = [line["loss"] for line in read_metrics(folder.metrics) if "loss" in line]
    chip = chip_of_device_kind(chosen.devices[0].device_kind)
    times = pace.step_seconds[1:] or pace.step_seconds
    step_seconds = statistics.median(times) if times else None
    return {
        "name": job.name,
        "steps": pace.number,
        "resumed_at": pace.first,
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "validation": asdict(validation.best) if validation.best.step else None,
        "loss_unit": loss_unit(program.method.objective.unit),
        "tokens": pace.number * program.derived.tokens_per_step,
        "parameters": count(program.model.specs()),
        "trainable_parameters": sum(leaf.size for leaf in jax.tree.leaves(program.learning)),
        "step_seconds": step_seconds,
        "predicted_step_seconds": step.predicted_seconds(chip) if chip is not None and chip.is_tpu else None,
        "tokens_per_second": pace.tokens_per_second(step_seconds) if step_seconds else None,
        "mfu": pace.mfu(step_seconds) if step_seconds else None,
        "wait_share": pace.wait_share,
        "train_seconds": pace.total_seconds,
        "program": step.hash,
        "compile_cached": step.cached,
        "mesh": str(program.derived.mesh),
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
