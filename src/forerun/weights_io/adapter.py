"""Adapters in the names and shapes of PEFT. The tensor tables of the families serve reading and writing.

A module that transformers fuses (qkv_proj of Phi-3) gets one adapter that combines those of its parts. Their ranks add
up: the rows of `lora_A` from one part affect only the outputs of that part. Reading separates them again.

transformers has the matrices of all experts of a layer in two parameters, `gate_up_proj` and `down_proj`. PEFT adapts a
parameter, too (`target_parameters`).

X experts of a parameter (1 for a module), R ranks, I inputs, O outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.config.training_method import Lora
from forerun.errors import UserError
from forerun.models.keys import EXPERT, LAYER, Part, Tensor, groups, leaves_of, path_text
from forerun.nn.spec import ParamSpec, Tree
from forerun.nn.weights.dense import Extended, is_weight
from forerun.nn.weights.lowrank import LowRank
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


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TOKENS = ".token_adapter.trainable_tokens_delta"
DOWN, UP, LENGTH = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


class AdapterArrays(NamedTuple):
    """The arrays of an adapter in forerun's shapes."""

    down: Any  # [L, I..., R]
    up: Any  # [L, R, O...]
    length: Any = None  # [L, O...], for DoRA


def adapters_of(params: Tree) -> dict[str, LowRank[Any]]:
    """Return the adapters by the path of their weight."""
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    return {path_text(path): leaf for path, leaf in flat if isinstance(leaf, LowRank)}


def new_rows_of(params: Tree) -> dict[str, Extended[Any]]:
    """Return the matrices with new rows by the path of the model's own leaf: `embed`, and `head.value` if untied."""
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    found = [(path_text(path), leaf) for path, leaf in flat if isinstance(leaf, Extended)]
    return {path if leaf.is_embedding else f"{path}.value": leaf for path, leaf in found}


def rows_to_peft(rows: Mapping[str, Array], table: Iterable[Tensor]) -> dict[str, Array]:
    """Return new rows as the tensors that PEFT calls trainable tokens, by their names in the file."""
    modules = _modules(rows, table)
    return {f"{PREFIX}{modules[path]}{TOKENS}": value for path, value in rows.items()}


def rows_config(first: Mapping[str, int], rows: Mapping[str, Array], table: Iterable[Tensor]) -> dict[str, Any]:
    """Return the entry `trainable_token_indices` of adapter_config.json: the ids of the new rows of each module."""
    if not rows:
        return {}
    modules = _modules(rows, table)
    ids = {modules[path].rpartition(".")[2]: [first[path] + n for n in range(len(rows[path]))] for path in rows}
    return {"trainable_token_indices": ids}


def _modules(paths: Iterable[str], table: Iterable[Tensor]) -> dict[str, str]:
    """Return the module in transformers of each path, such as `model.embed_tokens`."""
    names = {part.leaf: one.name.removesuffix(".weight") for one in table for part in one.parts}
    return {path: names[path.removesuffix(".value")] for path in paths}


def to_peft(adapters: Mapping[str, AdapterArrays], slots: Sequence[Slot]) -> dict[str, Array]:
    """Return the adapters as PEFT tensors, by their names in the file."""
    tensors: dict[str, Array] = {}
    for slot in slots:
        first = slot.part_of(adapters[next(slot.parts)[0]].down)
        rank, dtype = first.shape[-1], first.dtype
        up_XOR = np.zeros((slot.experts, sum(slot.rows), rank * sum(slot.adapted)), dtype)
        downs, lengths = [], []
        for path, rows, number in slot.parts:
            down, more, length = (half if half is None else slot.part_of(half) for half in adapters[path])
            assert down is not None
            assert more is not None
            downs.append(down.reshape(slot.experts, -1, rank).swapaxes(1, 2))
            up_XOR[:, rows, number * rank : (number + 1) * rank] = more.reshape(slot.experts, rank, -1).swapaxes(1, 2)
            if length is not None:
                lengths.append(length.reshape(-1))
        if lengths and not all(slot.adapted):
            raise _half_a_module(slot)
        down_XRI = np.concatenate(downs, axis=1)
        # PEFT has the ranks of one expert after the other in lora_A, and the experts of one rank in lora_B.
        tensors[PREFIX + slot.stem + DOWN] = down_XRI.reshape(-1, down_XRI.shape[-1])
        tensors[PREFIX + slot.stem + UP] = up_XOR.transpose(1, 2, 0).reshape(up_XOR.shape[1], -1)
        if lengths:
            tensors[PREFIX + slot.stem + LENGTH] = np.concatenate(lengths)
    return tensors


def _separated(down: Array, up: Array, experts: int) -> tuple[Array, Array]:
    """Return lora_A and lora_B with a dimension for experts, [X, R, I] and [X, O, R]."""
    return down.reshape(experts, -1, down.shape[-1]), up.reshape(len(up), -1, experts).transpose(2, 0, 1)


def from_peft(
    tensors: Mapping[str, Array], slots: Sequence[Slot], like: Mapping[str, AdapterArrays]
) -> dict[str, AdapterArrays]:
    """Return the adapters of PEFT tensors, in the shapes of `like`, as float32.

    The adapter of a fused module may have one rank for all parts, which then start with the same `down`. It may also
    have separate ranks for each part, as `to_peft` writes it.
    """
    made = {
        path: AdapterArrays(*(half and np.zeros(half.shape, np.float32) for half in one)) for path, one in like.items()
    }
    for slot in slots:
        whole_down, whole_up = (tensors[PREFIX + slot.stem + end].astype(np.float32) for end in (DOWN, UP))
        down_XRI, up_XOR = _separated(whole_down, whole_up, slot.experts)
        length = tensors.get(PREFIX + slot.stem + LENGTH)
        for path, rows, number in slot.parts:
            target = made[path]
            rank = target.down.shape[-1]
            own = slice(number * rank, (number + 1) * rank) if down_XRI.shape[1] > rank else slice(0, rank)
            slot.put(target.down, down_XRI[:, own].swapaxes(1, 2))
            slot.put(target.up, up_XOR[:, rows, own].swapaxes(1, 2))
            if target.length is not None and length is not None:
                slot.put(target.length, length[rows])
    return made


def config_json(lora: Lora, slots: Sequence[Slot], base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Rank and alpha of a fused module grow together, so that its scale does not change.
    """
    fused = {slot.suffix: sum(slot.adapted) for slot in slots if sum(slot.adapted) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": any(slot.turned for slot in slots if not slot.is_parameter),
        "inference_mode": True,
        "target_modules": _target_modules([slot for slot in slots if not slot.is_parameter]),
        **_target_parameters(slots),
        "rank_pattern": {name: lora.rank * parts for name, parts in fused.items()},
        "alpha_pattern": {
            name: lora.alpha * (math.sqrt(parts) if lora.rslora else parts) for name, parts in fused.items()
        },
    }


def _target_parameters(slots: Sequence[Slot]) -> dict[str, list[str]]:
    """Return the entry of the parameters for PEFT, if any: the ends of their names, or complete names."""
    found = {slot.suffix if slot.everywhere else slot.name for slot in slots if slot.is_parameter}
    return {"target_parameters": sorted(found)} if found else {}


def _target_modules(slots: Sequence[Slot]) -> list[str] | str:
    """Return the modules for PEFT: the ends of their names, or a pattern for the text part of a multimodal model.

    The end of a name selects the module in all layers, so a module with adapters in some of its layers has complete
    names. The vision tower may have modules with the same ends, which must not get adapters.
    """
    ends = sorted({slot.suffix for slot in slots if slot.everywhere and slot.layer is not None})
    names = sorted({slot.name for slot in slots if not slot.everywhere or slot.layer is None})
    if not any(".language_model." in f".{slot.name}" for slot in slots):
        return ends + names
    inside = [rf".*language_model\.layers\.\d+\.(?:{'|'.join(map(re.escape, ends))})"] if ends else []
    return "|".join([*inside, *map(re.escape, names)])


def differences(
    config: Mapping[str, Any], tensors: Mapping[str, Array], lora: Lora, slots: Sequence[Slot]
) -> list[str]:
    """Return the differences between a PEFT folder and the job's `lora` section, one line each."""
    if config.get("peft_type") != "LORA":
        return [f"it is {config.get('peft_type')}, not LORA"]
    found = [
        f"{key} is {config.get(name, False)} there, {wanted} here"
        for key, name, wanted in (("rslora", "use_rslora", lora.rslora), ("dora", "use_dora", lora.dora))
        if bool(config.get(name, False)) != wanted
    ]
    if config.get("bias", "none") != "none":
        found.append(f"it has biases ({config['bias']}), which adapters of forerun do not have")
    there = {name.removeprefix(PREFIX).removesuffix(DOWN) for name in tensors if name.endswith(DOWN)}
    here = {slot.stem: slot for slot in slots}
    for what, names in (("there and not here", there - set(here)), ("here and not there", set(here) - there)):
        if names:
            called = {here[name].name if name in here else name for name in names}
            found.append(f"targets {what}: {', '.join(sorted(_short(called)))}")
    known = {PREFIX + name + end for name in there for end in (DOWN, UP, LENGTH)}
    if config.get("trainable_token_indices"):
        found.append("it has rows of new tokens, which lora.start cannot read")
    if others := sorted(set(tensors) - known):
        found.append(f"tensors that are not adapters: {', '.join(others[:3])}")
    shared = [here[name] for name in sorted(there & set(here))]
    return found + sorted({line for slot in shared for line in _misfits(slot, config, tensors, lora)})


def _misfits(slot: Slot, config: Mapping[str, Any], tensors: Mapping[str, Array], lora: Lora) -> Iterator[str]:
    down, up = (tensors.get(PREFIX + slot.stem + end) for end in (DOWN, UP))
    parts = sum(slot.adapted)
    if down is None or up is None or up.ndim != 2 or down.ndim != 2 or up.shape != (sum(slot.rows), len(down)):
        yield f"{slot.suffix}: its two halves do not belong together"
        return
    if len(down) % slot.experts:
        yield f"{slot.suffix}: its ranks are not those of {slot.experts} experts"
        return
    rank, up_XOR = len(down) // slot.experts, _separated(down, up, slot.experts)[1]
    if rank != lora.rank and not (rank == parts * lora.rank and _separate(up_XOR, slot, lora.rank)):
        yield f"rank is {rank} there, {lora.rank} here"
        return
    if parts < len(slot.paths) and any(np.any(up_XOR[:, rows]) for rows in _without(slot)):
        yield f"{slot.suffix}: it changes more than lora.targets names"
    alpha = _matched(config.get("alpha_pattern"), slot.name, config.get("lora_alpha", 8))
    ranks = math.sqrt(rank) if config.get("use_rslora") else rank
    if not math.isclose(alpha / ranks, lora.scale, rel_tol=1e-6):
        yield f"alpha is {lora.alpha * (alpha / ranks) / lora.scale:g} there, {lora.alpha:g} here"
    if lora.dora and config.get("use_dora") and PREFIX + slot.stem + LENGTH not in tensors:
        yield f"{slot.suffix}: no lora_magnitude_vector"


def _separate(up_XOR: Array, slot: Slot, rank: int) -> bool:
    """Return whether the outputs of every part use only the ranks of that part."""
    rest = up_XOR.copy()
    for _, rows, number in slot.parts:
        rest[:, rows, number * rank : (number + 1) * rank] = 0
    return not rest.any()


def _without(slot: Slot) -> Iterator[slice]:
    """Yield the outputs of each weight without an adapter."""
    for rows, adapted in zip(slot.outputs, slot.adapted, strict=True):
        if not adapted:
            yield rows


def _matched(patterns: Mapping[str, Any] | None, name: str, otherwise: float) -> float:
    """Return the rank or alpha of a module, matched by the same patterns as in PEFT."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return float(next(found, otherwise))


def _short(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _half_a_module(slot: Slot) -> UserError:
    without = ", ".join(path for path, adapted in zip(slot.paths, slot.adapted, strict=True) if not adapted)
    return UserError(
        "E-WEIGHTS-001",
        f"a DoRA adapter on part of {slot.suffix} has no PEFT form",
        why=f"{' and '.join(slot.paths)} are one module in PEFT, and there is no adapter on {without}",
        fix="export it with --merge, or train with all of them in lora.targets",
    )
