"""Quantization-aware training (QAT) as a transform of specs: every forward pass rounds the target weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from forerun.config.training_method import Qat
from forerun.errors import UserError
from forerun.methods.targets import chosen_paths
from forerun.models.keys import path_text, table_path
from forerun.models.model_facts import ModelFacts
from forerun.models.quantization_config import Rounding
from forerun.nn.spec import ParamSpec, Tree
from forerun.nn.weights.dense import is_weight
from forerun.nn.weights.fakequant import FakeQuantized, scale_spec
from forerun.resolve.resolved_job import ResolvedJob


@dataclass(frozen=True)
class QatTransform:
    """The transform for QAT."""

    qat: Qat
    names: Mapping[str, str] = field(hash=False)  # path of a weight -> its name in transformers, with {} for the layer
    given: Rounding | None = None  # the rounding of the model's files, if it is that of the job
    rests: bool = False  # whether the weights are frozen, because the job trains only adapters

    def reads(self, specs: Tree) -> Tree:
        """Return the specs in which files are read: weights that the files have as integers keep their scales."""
        if self.given is None:
            return specs
        chosen = chosen_paths(specs, self.qat.patterns, self.names, "qat.targets")

        def leaf(path: Any, weight: Any) -> Any:
            text = path_text(path)
            return self._read(text, weight) if text in chosen and self._is_given(text) else weight

        return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_weight)

    def specs(self, specs: Tree) -> Tree:
        """Return the specs with fake-quantized target weights."""
        chosen = chosen_paths(specs, self.qat.patterns, self.names, "qat.targets")

        def leaf(path: Any, weight: Any) -> Any:
            return self._rounding(path_text(path), weight) if path_text(path) in chosen else weight

        return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_weight)

    def start(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Return `params` with fake-quantized target weights.

        Learned scales start as the computed ones, so the first forward pass is that of the rounded model.
        """

        def leaf(made: Any, weight: Any) -> Any:
            if not isinstance(made, FakeQuantized):
                return weight
            if isinstance(weight, FakeQuantized):
                return _kept(made, weight)
            computed = replace(made, value=weight.value, log_scale=None)
            if made.log_scale is None:
                return computed
            _, scale = computed.codes()
            return replace(computed, log_scale=jnp.log(scale.astype(jnp.float32)))

        return jax.tree.map(leaf, self.specs(specs), params, is_leaf=is_weight)

    def _is_given(self, path: str) -> bool:
        name = self.names.get(table_path(path))
        return name is not None and self.given is not None and self.given.keeps(name)

    def _read(self, path: str, weight: Any) -> FakeQuantized[ParamSpec]:
        scale = replace(scale_spec(weight.value, self.qat.group), dtype=jnp.dtype("bfloat16"))
        return replace(self._rounding(path, weight), log_scale=None, scale=scale)

    def _rounding(self, path: str, weight: Any) -> FakeQuantized[ParamSpec]:
        if isinstance(weight, FakeQuantized) and self.rests:
            return weight
        s = weight.value
        lead = 1 if s.axes.startswith("L") else 0
        cut = lead + s.inputs
        total = math.prod(s.shape[lead:cut])
        group = self.qat.group
        if group is not None and total % group:
            raise UserError(
                "E-METHOD-002",
                f"qat.group: {group} does not divide the {total} inputs of {path}",
                why="every group of inputs has its own scale, and all groups have the same size",
                fix=f"choose a divisor of {total}, or null for one scale per output channel",
            )
        return FakeQuantized(
            value=s,
            log_scale=scale_spec(s, group) if self.qat.scales == "learned" else None,
            inputs=s.inputs,
            outputs=len(s.shape) - cut,
            bits=self.qat.bits,
            group=group,
            activations=self.qat.activations is not None,
        )


def _kept(made: FakeQuantized[Any], weight: FakeQuantized[jax.Array]) -> FakeQuantized[jax.Array]:
    """Return a weight that was read as integers in the form that the run holds, with the same codes and scales."""
    if made.scale is not None:
        return weight
    if made.log_scale is None:
        return weight.computed()
    assert weight.scale is not None
    return replace(weight, scale=None, log_scale=jnp.log(weight.scale.astype(jnp.float32)))


# ---- Checkpoints with integer weights ----


def kept_rounding(resolved: ResolvedJob) -> Rounding | None:
    """Return the rounding of the model's files if the run rounds its weights in the same way, or None."""
    checkpoint, qat = resolved.model_facts.checkpoint, resolved.job.qat
    rounding = None if checkpoint is None else checkpoint.rounding
    if rounding is None or qat is None or (rounding.bits, rounding.group) != (qat.bits, qat.group):
        return None
    return rounding


def adapter_inside(facts: ModelFacts) -> Path | None:
    """Return the folder of the adapter that an export wrote beside an integer base, or None."""
    if facts.checkpoint is None or facts.checkpoint.packed is None:
        return None
    folder = facts.checkpoint.snapshot.folder / "adapter"
    return folder if folder.is_dir() else None


def rounding_messages(resolved: ResolvedJob) -> list[tuple[str, bool]]:
    """Return messages about integer weights in the model's files, each with whether it is a warning."""
    job, checkpoint = resolved.job, resolved.model_facts.checkpoint
    if checkpoint is None or checkpoint.rounding is None:
        return []
    messages = []
    adapter = adapter_inside(resolved.model_facts)
    start = job.lora.start if job.lora is not None else None
    if adapter is not None and (start is None or Path(start).resolve() != adapter.resolve()):
        messages.append((f"the adapter in {adapter} is not applied; to start from it, set lora.start: {adapter}", True))
    integers = f"{job.model.name} has integers ({checkpoint.rounding})"
    if job.qat is not None:
        if kept_rounding(resolved) is not None:
            return [*messages, (f"{integers}: the run starts with their codes and scales", False)]
        rounding = Rounding(job.qat.bits, job.qat.group, job.qat.activations is not None)
        return [*messages, (f"{integers}, which are rounded again to {rounding}", True)]
    if job.lora is not None and job.lora.is_quantized:
        messages.append((f"{integers}, which are rounded again to {job.lora.base}; qat keeps them", True))
    elif checkpoint.packed is not None:
        messages.append((f"{integers}, which are read as floats; qat keeps them", True))
    return messages
