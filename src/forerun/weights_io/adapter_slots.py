"""The modules and parameters of transformers that PEFT adapts, and the weights of forerun in each of them.

transformers has the matrices of all experts of a layer in two parameters, `gate_up_proj` and `down_proj`. PEFT adapts a
parameter, too (`target_parameters`). X experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.models.keys import EXPERT, LAYER, Part, Tensor, groups, leaves_of
from forerun.nn.spec import ParamSpec
from forerun.weights_io.match import Stacked

Array = NDArray[Any]
ROUTER = "blocks.router"
FUSED_EXPERTS = {"gate_up_proj": ("blocks.expert_gate", "blocks.expert_up"), "down_proj": ("blocks.expert_down",)}


@dataclass(frozen=True)
class Slot:
    """A module of transformers, in one layer or outside the layers, and the weights that are concatenated in it.

    It may also be a parameter of a module: that of all experts, or that of a router.
    """

    name: str  # "model.layers.3.self_attn.q_proj"
    suffix: str  # the same in every layer: "self_attn.q_proj"
    paths: tuple[str, ...]  # "blocks.query"
    rows: tuple[int, ...]  # number of outputs of each weight
    adapted: tuple[bool, ...]  # whether each weight has an adapter
    layer: int | None  # index in the stack; None for a module outside the layers
    turned: bool  # the tensor has its inputs first, as in GPT-2
    everywhere: bool = True  # every layer that has this module has an adapter on it
    experts: int = 1  # number of matrices; the adapter of each has its own ranks
    is_parameter: bool = False
    is_interleaved: bool = False  # the outputs of the weights alternate
    is_inner: bool = False  # PEFT wraps the module once more for another parameter of it

    @property
    def stem(self) -> str:
        """The name of the module in the names of tensors. PEFT's wrapper of a parameter has the name of its module."""
        module = self.name.rpartition(".")[0] if self.is_parameter else self.name
        return f"{module}.base_layer" if self.is_inner else module

    @property
    def parts(self) -> Iterator[tuple[str, slice, int]]:
        """The path, outputs and number of each weight that has an adapter."""
        number = 0
        for path, rows, adapted in zip(self.paths, self.outputs, self.adapted, strict=True):
            if adapted:
                yield path, rows, number
                number += 1

    @property
    def outputs(self) -> Iterator[slice]:
        """The outputs of each weight."""
        first = 0
        for number, rows in enumerate(self.rows):
            yield slice(number, None, len(self.rows)) if self.is_interleaved else slice(first, first + rows)
            first += rows

    def part_of(self, stacked: Any) -> Array:
        """Return the part of an adapter's array that belongs to this module."""
        array = np.asarray(stacked)
        return array if self.layer is None else array[self.layer]

    def put(self, stacked: Array, part: Array) -> None:
        """Write the part of this module into an adapter's array."""
        target = stacked if self.layer is None else stacked[self.layer]
        target[...] = part.astype(stacked.dtype).reshape(target.shape)


def slots_of(table: Iterable[Tensor], model: Stacked, adapted: Iterable[str]) -> list[Slot]:
    """Return every module of transformers that has at least one of the adapters at these paths."""
    leaves, wanted = leaves_of(model.specs()), set(adapted)
    found: list[Slot] = []
    for one in _with_fused_experts(table):
        name = one.name if _is_parameter(one) else one.name.removesuffix(".weight")
        if LAYER not in name:
            found += _slots(one, [part.leaf for part in one.parts], leaves, wanted, {None: name})
            continue
        inside: list[Slot] = []
        everywhere = True
        for stack in model.stacks:
            paths = [stack.path(part.leaf) for part in one.parts]
            layers = {n: name.replace(LAYER, str(number)) for n, number in enumerate(stack.numbers)}
            made = _slots(one, paths, leaves, wanted, layers)
            everywhere = everywhere and (bool(made) or f"{paths[0]}.value" not in leaves)
            inside += made
        found += [replace(slot, everywhere=everywhere) for slot in inside]
    outer = {slot.stem for slot in found if slot.is_parameter and slot.name.endswith(".down_proj")}
    return [replace(slot, is_inner=slot.name.endswith(".gate_up_proj") and slot.stem in outer) for slot in found]


def _with_fused_experts(table: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of matrices, with the parameters of transformers in place of tensors of single experts."""
    parts: dict[str, Part] = {}
    for one in table:
        if EXPERT not in one.name:
            if one.name.endswith(".weight") or ".experts." in one.name:
                yield one
            continue
        parts |= {part.leaf: part for part in one.parts}
        module = one.name.partition(f".{EXPERT}")[0]
        for parameter, wanted in FUSED_EXPERTS.items():
            if one.parts[0].leaf == wanted[-1]:
                yield Tensor(f"{module}.{parameter}", tuple(parts[leaf] for leaf in wanted))


def _is_parameter(one: Tensor) -> bool:
    """Return whether PEFT adapts the tensor as a parameter. Most routers of transformers are no linear layers."""
    is_router = one.parts[0].leaf == ROUTER and not one.name.endswith(".proj.weight")  # Gemma 4 has a linear layer
    return not one.name.endswith(".weight") or is_router


def _slots(
    one: Tensor,
    paths: Sequence[str],
    leaves: Mapping[str, ParamSpec],
    wanted: set[str],
    layers: Mapping[int, str] | Mapping[None, str],
) -> list[Slot]:
    """Return the slots of one tensor of the table, or none if no part of it has an adapter.

    Args:
        one: The tensor.
        paths: The paths of its parts in the parameters.
        leaves: All specs of the model.
        wanted: The paths with an adapter.
        layers: The full name of the module for each index in the stack.
    """
    if not wanted & set(paths):
        return []
    if ".experts." in one.name and {part.leaf for part in one.parts} not in map(set, FUSED_EXPERTS.values()):
        raise _experts_have_no_form(one)
    specs = [leaves[f"{path}.value"] for path in paths]
    rows = tuple(_outputs(spec) for spec in specs)
    turned = {_turned(part, spec) for part, spec in zip(one.parts, specs, strict=True)}
    along = one.along - ("X" in one.parts[0].form)  # among the dimensions of one matrix
    if len(turned) > 1 or (len(paths) > 1 and along != (1 if True in turned else 0)):
        raise ValueError(f"{one.name} is not fused along its outputs")
    has, inputs_first = tuple(path in wanted for path in paths), turned.pop()
    suffix = one.name.rpartition(f"{LAYER}.")[2].removesuffix(".weight")
    if _is_parameter(one):
        suffix = one.name.rpartition(f"{LAYER}.")[2]
    experts = specs[0].shape[specs[0].axes.index("X")] if ".experts." in one.name else 1
    return [
        Slot(name, suffix, tuple(paths), rows, has, n, inputs_first, True, experts, _is_parameter(one), one.interleaved)
        for n, name in layers.items()
    ]


def _outputs(spec: ParamSpec) -> int:
    return math.prod(spec.shape[spec.lead + spec.inputs :])


def _turned(part: Part, spec: ParamSpec) -> bool:
    """Return whether the tensor's first dimension is the inputs. Its letters must be in the order of the weight."""
    axes = spec.axes[spec.lead :]
    ins, outs = axes[: spec.inputs], axes[spec.inputs :]
    found = [group for group in groups(part.form) if group != "X" or "X" in axes]
    if found not in ([outs, ins], [ins, outs]):
        raise ValueError(f"{part.leaf}: {part.form} is not a matrix of {ins} and {outs}")
    return found == [ins, outs]


def _experts_have_no_form(one: Tensor) -> UserError:
    return UserError(
        "E-WEIGHTS-032",
        f"adapters of {one.name.removesuffix('.weight')} have no PEFT form that forerun writes or reads",
        why="PEFT adapts all experts of a layer as one parameter, and this one is not gate_up_proj or down_proj",
        fix="export the run with --merge; or train with lora.targets=[q_proj, k_proj, v_proj, o_proj]",
    )
