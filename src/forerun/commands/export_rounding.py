"""Helpers of `export` for runs with rounded weights."""

from __future__ import annotations

from typing import Any

from forerun.config.schema import Job
from forerun.hub.snapshot import Snapshot
from forerun.methods.kept import keeps_rounding
from forerun.models.base import Model
from forerun.models.keys import leaves_of
from forerun.models.rounding import QUANTIZATION
from forerun.weights_io.scales import rounded_weights


def config_without(source: Snapshot) -> dict[str, Any]:
    """Return config.json without its section on integers."""
    return {key: value for key, value in source.config().items() if key != QUANTIZATION}


def has_scales(job: Job) -> bool:
    """Return whether a dense export has scales to record: not if adapters were multiplied into the weights."""
    return job.method.trains_rounded_weights


def surely_moved(job: Job, model: Model, params: Any) -> set[str] | None:
    """Return paths of the weights that a run with `qat` surely changes; None: all.

    Codes that the base had before may all stay as they were, and under adapters they do.
    """
    rounded = {f"{path}.value" for path in rounded_weights(params)}
    kept = keeps_rounding(job)
    if job.method.trains_adapters:
        return set() if kept else rounded
    return set(leaves_of(model.specs())) - rounded if kept else None
