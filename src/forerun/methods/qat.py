"""Quantization-aware training as a transform: weights that are rounded in every forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from forerun.config.qat import Qat
from forerun.errors import UserError
from forerun.methods.targets import chosen_paths
from forerun.models.keys import path_text
from forerun.models.rounding import Rounding
from forerun.nn.fakequant import FakeQuantized, scale_spec
from forerun.nn.spec import ParamSpec, Tree
from forerun.nn.weights import is_weight


@dataclass(frozen=True)
class QatTransform:
    """`names`: what transformers calls the weights, path by path, with {} for the layer; `given`: how the files of the
    model were rounded, if in the way that the job wants; `rests`: whether only adapters learn."""

    qat: Qat
    names: Mapping[str, str] = field(hash=False)
    given: Rounding | None = None
    rests: bool = False

    def reads(self, specs: Tree) -> Tree:
        """Weights that the files have as integers are read with their scales."""
        if self.given is None:
            return specs
        chosen = chosen_paths(specs, self.qat.patterns, self.names, "qat.targets")

        def leaf(path: Any, weight: Any) -> Any:
            text = path_text(path)
            return self._read(text, weight) if text in chosen and self._is_given(text) else weight

        return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_weight)

    def specs(self, specs: Tree) -> Tree:
        chosen = chosen_paths(specs, self.qat.patterns, self.names, "qat.targets")

        def leaf(path: Any, weight: Any) -> Any:
            return self._rounding(path_text(path), weight) if path_text(path) in chosen else weight

        return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_weight)

    def start(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Learned scales begin as the computed ones: the first forward pass is that of the rounded model."""

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
        name = self.names.get(path.replace("tail.", "blocks.", 1))
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
                f"qat.group: {group} does not divide the {total} inputs of {path}",
                why="every group of inputs has a scale of its own, and groups are of one size",
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
    """Return the weight as the run holds it, with the codes and scales that it was read with."""
    if made.scale is not None:
        return weight
    if made.log_scale is None:
        return weight.computed()
    assert weight.scale is not None
    return replace(weight, scale=None, log_scale=jnp.log(weight.scale.astype(jnp.float32)))
