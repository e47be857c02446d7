"""Quantization-aware training (QAT) as a transform of specs: every forward pass rounds the target weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from forerun.config.training_method import Qat
from forerun.errors import UserError
from forerun.methods.targets import chosen_paths
from forerun.models.keys import path_text, table_path
from forerun.models.rounding import Rounding
from forerun.nn.spec import ParamSpec, Tree
from forerun.nn.weights.dense import is_weight
from forerun.nn.weights.fakequant import FakeQuantized, scale_spec


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
