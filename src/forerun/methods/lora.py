"""LoRA as a transform: matrices at rest, an adapter beside those that the job names."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from forerun.config.methods import Lora
from forerun.errors import UserError
from forerun.methods.targets import chosen_paths, is_linear
from forerun.models.keys import path_text
from forerun.nn import spec
from forerun.nn.lowrank import LowRank, norms
from forerun.nn.quantized import Quantized, quantized_spec
from forerun.nn.spec import Fill, ParamSpec, Tree
from forerun.nn.weights import Dense, is_weight

ADAPTER = "adapter"  # among what is read from files: {path of a weight: {"down": ..., "up": ...}}


@dataclass(frozen=True)
class Uniform:
    """Between -limit and limit."""

    limit: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -self.limit, self.limit).astype(dtype)


@dataclass(frozen=True)
class LoraTransform:
    """`names`: what transformers calls the weights, path by path, with {} for the layer; `dtype` is the adapters'."""

    lora: Lora
    dtype: str
    names: Mapping[str, str] = field(hash=False)

    def reads(self, specs: Tree) -> Tree:
        """Files are read as the base rests: a quantized matrix never lies dense on the devices."""
        specs = spec.cast(specs, jnp.dtype(self.lora.resting))
        if not self.lora.is_quantized:
            return specs

        def leaf(path: Any, weight: Any) -> Any:
            if not is_linear(weight):
                return weight
            _require_blocks(path_text(path), weight.value, self.lora.block)
            return quantized_spec(weight.value, self.lora.base, self.lora.block)

        return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_weight)

    def specs(self, specs: Tree) -> Tree:
        chosen = chosen_paths(specs, self.lora.patterns, self.names, "lora.targets")

        def leaf(path: Any, weight: Any) -> Any:
            resting = spec.map_specs(lambda s: replace(s, trainable=False, saved=False), weight)
            return self._adapted(resting) if path_text(path) in chosen else resting

        return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=lambda x: is_weight(x) or spec.is_spec(x))

    def start(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Adapters that were read, or that change nothing yet: the first half as PEFT draws it, the second zero."""

        def leaf(path: Any, made: Any, weight: Any) -> Any:
            if not isinstance(made, LowRank):
                return weight
            if ADAPTER in given:
                return replace(made, base=weight, **given[ADAPTER][path_text(path)])
            own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
            fresh = spec.initial({"down": made.down, "up": made.up}, own)
            length = made.length and _lengths(weight, made)
            return replace(made, base=weight, length=length, **fresh)

        return jax.tree_util.tree_map_with_path(leaf, self.specs(specs), params, is_leaf=is_weight)

    def _adapted(self, base: Any) -> LowRank[ParamSpec]:
        shape, axes, inputs, layers = _dense(base)
        R, layer = self.lora.rank, "L" if layers else ""
        ins, outs = shape[:inputs], shape[inputs:]
        down = ParamSpec((*layers, *ins, R), f"{layer}{axes[:inputs]}R", Uniform(1 / math.sqrt(math.prod(ins))))
        up = ParamSpec((*layers, R, *outs), f"{layer}R{axes[inputs:]}", Fill(0.0))
        length = ParamSpec((*layers, *outs), layer + axes[inputs:], Fill(1.0), decay=False)
        down, up, length = (replace(one, dtype=jnp.dtype(self.dtype)) for one in (down, up, length))
        return LowRank(
            base=base,
            down=down,
            up=up,
            length=length if self.lora.dora else None,
            inputs=inputs,
            scale=self.lora.scale,
            dropout=self.lora.dropout,
        )


def _dense(base: Any) -> tuple[tuple[int, ...], str, int, tuple[int, ...]]:
    """(shape, letters, inputs) of one matrix, and the layers that are stacked, if they are."""
    if isinstance(base, Quantized):
        return base.shape, base.axes, base.inputs, base.codes.shape[:-3]
    s = base.value
    lead = 1 if s.axes.startswith("L") else 0
    return s.shape[lead:], s.axes[lead:], s.inputs, s.shape[:lead]


def _require_blocks(path: str, s: ParamSpec, block: int) -> None:
    shape, _, inputs, _ = _dense(Dense(s))
    ins = math.prod(shape[:inputs])
    if ins % block:
        fits = max((n for n in range(2, block, 2) if ins % n == 0), default=None)
        raise UserError(
            f"lora.block={block} does not divide the inputs of {path}",
            why=f"it has {ins} of them, and {block} share a scale",
            fix=f"lora.block={fits}" if fits else "keep the base in bfloat16: lora.base=bfloat16",
        )


def _lengths(weight: Any, made: LowRank[ParamSpec]) -> jax.Array:
    """DoRA begins with the lengths that the base has."""
    assert made.length is not None
    matrix = weight.matrix("", jnp.float32)
    return (
        norms(matrix, made.inputs, len(made.down.axes) - 1 - made.inputs)
        .reshape(made.length.shape)
        .astype(made.length.dtype)
    )
