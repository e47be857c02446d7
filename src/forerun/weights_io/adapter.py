"""Adapters in the names and shapes of PEFT. The tensor tables of the families serve reading and writing.

A module that transformers fuses (qkv_proj of Phi-3) gets one adapter that combines those of its parts. Their ranks add
up: the rows of `lora_A` from one part affect only the outputs of that part. Reading separates them again.

X experts of a parameter (1 for a module), R ranks, I inputs, O outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from forerun.config.training_method import Lora
from forerun.errors import UserError
from forerun.models.keys import Tensor, path_text
from forerun.nn.spec import Tree
from forerun.nn.weights.dense import is_weight
from forerun.nn.weights.extended import Extended
from forerun.nn.weights.lowrank import LowRank
from forerun.weights_io.adapter_slots import Array, Slot

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
