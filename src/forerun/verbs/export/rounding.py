"""Helpers of `export` for runs with rounded weights."""

from __future__ import annotations

from typing import Any, cast

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hub.snapshot import Snapshot
from forerun.methods.kept import kept_rounding
from forerun.methods.method import run_specs
from forerun.models.keys import leaves_of
from forerun.models.rounding import QUANTIZATION
from forerun.resolve.resolved_job import ResolvedJob
from forerun.weights_io.match import Stacked
from forerun.weights_io.packed import section_of
from forerun.weights_io.scales import rounded_weights


def config_without(source: Snapshot) -> dict[str, Any]:
    """Return config.json without its section on integers."""
    return {key: value for key, value in source.config().items() if key != QUANTIZATION}


def has_scales(job: Job) -> bool:
    """Return whether a dense export has scales to record: not if adapters were multiplied into the weights."""
    return job.method.trains_rounded_weights


def integer_section(resolved: ResolvedJob) -> dict[str, Any] | None:
    """Return the `quantization_config` of an export of integers. None if a tensor has no integer form (GPT-2)."""
    family, model = resolved.model_facts.family, resolved.model
    assert family is not None, "`export` rejects a model without a family"
    try:
        return section_of(run_specs(resolved), family, cast(Stacked, model))
    except UserError:  # the only errors of `section_of` are about tensors without an integer form
        return None


def surely_moved(resolved: ResolvedJob, params: Any) -> set[str] | None:
    """Return paths of the weights that a run with `qat` surely changes; None: all.

    Codes that the base had before may all stay as they were, and under adapters they do.
    """
    rounded = {f"{path}.value" for path in rounded_weights(params)}
    kept = kept_rounding(resolved) is not None
    if resolved.job.method.trains_adapters:
        return set() if kept else rounded
    return set(leaves_of(resolved.model.specs())) - rounded if kept else None
