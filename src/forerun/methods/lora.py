"""LoRA as a transform of specs: all weights are frozen, and the matrices that the job names get an adapter."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from forerun.config.training_method import Lora
from forerun.errors import UserError
from forerun.methods.targets import chosen_paths, is_linear
from forerun.models.keys import path_text, table_path
from forerun.nn import spec
from forerun.nn.spec import Fill, ParamSpec, Tree
from forerun.nn.weights.dense import Dense, is_weight
from forerun.nn.weights.lowrank import LowRank, expert_share, is_experts, norms
from forerun.nn.weights.quantized import Quantized, quantized_spec

TARGETS_KEY = "lora.targets"
# Paths in a family's table that "all-linear" leaves out. Public adapters do not have the projections of the per-layer
# embeddings of Gemma 4. Routers and gates of shared experts stay frozen, so that a token keeps its experts.
OPTIONAL = ("layer_projection", "blocks.layer_gate", "blocks.layer_out", "blocks.router", "blocks.shared_gate")
# Paths that are not quantized. A small error of a router's scores would choose other experts, and a gate of a shared
# expert has one column, so that its scales and codes would save nothing.
EXACT = ("blocks.router", "blocks.shared_gate")
ADAPTER = "adapter"  # key of adapters that were read from files: {path of a weight: {"down": ..., "up": ...}}


@dataclass(frozen=True)
class Uniform:
    """Uniform values between -limit and limit."""

    limit: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -self.limit, self.limit).astype(dtype)


@dataclass(frozen=True)
class LoraTransform:
    """The transform for LoRA and DoRA."""

    lora: Lora
    dtype: str  # of the adapters
    names: Mapping[str, str] = field(hash=False)  # path of a weight -> its name in transformers, with {} for the layer

    def reads(self, specs: Tree) -> Tree:
        """Return the specs in which files are read: those of the frozen base.

        A quantized base is quantized while it is read, so its dense matrices are never on the devices.
        """
        specs = spec.cast(specs, jnp.dtype(self.lora.resting))
        if not self.lora.is_quantized:
            return specs

        def leaf(path: Any, weight: Any) -> Any:
            if not is_linear(weight) or (self.names and table_path(path_text(path)) in EXACT):
                return weight
            _require_blocks(path_text(path), weight.value, self.lora.block)
            assert self.lora.base is not None, "only an explicit base is quantized"
            return quantized_spec(weight.value, self.lora.base, self.lora.block, expert_share(weight))

        return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_weight)

    def specs(self, specs: Tree) -> Tree:
        """Return the specs of a frozen base with an adapter on each target."""
        optional = OPTIONAL if self.names else ()  # in a custom model, a path with such a name is another matrix
        chosen = chosen_paths(specs, self.lora.patterns, self.names, TARGETS_KEY, optional)

        def leaf(path: Any, weight: Any) -> Any:
            if path_text(path) in chosen and is_experts(weight):
                self._require_plain_adapter(path_text(path))
            resting = spec.map_specs(lambda s: replace(s, trainable=False, saved=False), weight)
            return self._adapted(resting) if path_text(path) in chosen else resting

        return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=lambda x: is_weight(x) or spec.is_spec(x))

    def start(self, specs: Tree, params: Tree, given: Mapping[str, Tree], key: jax.Array) -> Tree:
        """Return `params` with adapters: those in `given`, or new ones that do not change the model yet.

        For new adapters, `down` has the distribution that PEFT uses, and `up` is zero.
        """

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

    def _require_plain_adapter(self, path: str) -> None:
        """Raise a UserError for DoRA or dropout on experts."""
        key = "dora" if self.lora.dora else "dropout"
        if self.lora.dora or self.lora.dropout:
            raise UserError(
                "E-METHOD-043",
                f"lora.{key} is not possible for experts",
                why=f"{path} has one adapter per expert, which has neither learned lengths nor dropout",
                fix=f"remove lora.{key}, or name only other matrices: lora.targets=[q_proj, k_proj, v_proj, o_proj]",
            )

    def _adapted(self, base: Any) -> LowRank[ParamSpec]:
        shape, axes, inputs, layers = _dense(base)
        R, lead = self.lora.rank, "LX"[: len(layers)]
        ins, outs = shape[:inputs], shape[inputs:]
        down = ParamSpec((*layers, *ins, R), f"{lead}{axes[:inputs]}R", Uniform(1 / math.sqrt(math.prod(ins))))
        up = ParamSpec((*layers, R, *outs), f"{lead}R{axes[inputs:]}", Fill(0.0))
        length = ParamSpec((*layers, *outs), lead + axes[inputs:], Fill(1.0), decay=False)
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
    """Return shape, axes and inputs of one matrix, and the dimensions for layers and experts before it (or none)."""
    if isinstance(base, Quantized):
        return base.shape, base.axes, base.inputs, base.codes.shape[:-3]
    s = base.value
    lead = s.lead
    return s.shape[lead:], s.axes[lead:], s.inputs, s.shape[:lead]


def _require_blocks(path: str, s: ParamSpec, block: int) -> None:
    """Raise a UserError if the inputs of a matrix do not divide into blocks."""
    shape, _, inputs, _ = _dense(Dense(s))
    ins = math.prod(shape[:inputs])
    if ins % block:
        fits = max((n for n in range(2, block, 2) if ins % n == 0), default=None)
        raise UserError(
            "E-METHOD-001",
            f"lora.block={block} does not divide the inputs of {path}",
            why=f"it has {ins} inputs, and every {block} of them share a scale",
            fix=f"set lora.block={fits}" if fits else "keep the base in bfloat16: lora.base=bfloat16",
        )


def _lengths(weight: Any, made: LowRank[ParamSpec]) -> jax.Array:
    """Return the initial lengths of DoRA, which are those of the base."""
    assert made.length is not None
    matrix = weight.matrix("", jnp.float32)
    return (
        norms(matrix, made.inputs, len(made.down.axes) - 1 - made.inputs)
        .reshape(made.length.shape)
        .astype(made.length.dtype)
    )
