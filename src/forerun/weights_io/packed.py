"""Integer weights in the format of compressed-tensors, which transformers and vLLM load.

A checkpoint has codes, scales, and a section in config.json. The format `pack-quantized` packs several codes into an
int32. The format `int-quantized`, which kernels with 8-bit activations need, has one code per byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.hub.files import shown
from forerun.hub.safetensors import Selection, TensorInfo, Weights, open_weights
from forerun.hub.snapshot import Snapshot
from forerun.models.families.base import Family
from forerun.models.families.wrapper import wrapper_of
from forerun.models.keys import Entry, Tensor, entries, path_text
from forerun.models.model_facts import Pretrained
from forerun.models.quantization_config import (
    BYTES,
    PACKED,
    QUANTIZATION,
    RECORD,
    Rounding,
    float8_in,
    is_mxfp4,
    rounding_in,
)
from forerun.nn.spec import Tree
from forerun.nn.weights.dense import Dense, is_weight
from forerun.nn.weights.fakequant import FakeQuantized
from forerun.weights_io.documents import write_json
from forerun.weights_io.leaves import Copier
from forerun.weights_io.low_precision import Converted, Dequantized, DequantizedExperts
from forerun.weights_io.match import READABLE, Stacked, dtypes_of
from forerun.weights_io.scales import SUFFIX, rounded_weights, scale_entries
from forerun.weights_io.shards import Planned, Shards, shards_of
from forerun.weights_io.write import SHARD_BYTES, copied, planned_copies, tensor_dtype, value_of

_WORD_BITS = 32


def layout_of(params: Tree) -> Rounding:
    """Return the rounding of the fake-quantized weights, which is the same for all of them."""
    (layout,) = {Rounding(one.bits, one.group, one.activations) for one in rounded_weights(params).values()}
    return layout


def write_packed(
    folder: Path,
    params: Tree,
    family: Family,
    model: Stacked,
    dtype: str | Mapping[str, str],
    others: Weights | None = None,
) -> dict[str, Any]:
    """Write the weights as integers with scales, and return the `quantization_config` section for config.json.

    Args:
        folder: The folder of the export.
        params: The parameters, with fake-quantized weights.
        family: The family, whose table names the tensors.
        model: The model.
        dtype: The dtype of the weights that are not rounded: one for all, or one per tensor name.
        others: Tensors that are copied unchanged.
    """
    table, layout = family.table, layout_of(params)
    codes, scales = _arrays(params)
    whole = {entry.name: entry for entry in entries(table, model.specs(), model.stacks)}
    steps = scale_entries(params, table, model)
    planned = [tensor for entry in whole.values() for tensor in _planned(entry, steps, layout, dtype)]
    planned += planned_copies(others)
    places = {**codes, **scales}
    with Copier(leaf.sharding for leaf in places.values()) as copier:

        def written(tensor: Planned) -> NDArray[Any]:
            name, _, kind = tensor.name.rpartition(".")
            if others is not None and tensor.name in others:
                return copied(others, tensor)
            if tensor.name in steps:
                return value_of(steps[tensor.name], tensor, scales, copier)
            entry = whole[f"{name}.weight"] if kind.startswith("weight_") else whole[tensor.name]
            if kind == "weight_shape":
                return np.array(entry.shape, np.int64)
            if kind == "weight_packed":
                plain = value_of(entry, Planned(entry.name, "I8", entry.shape), codes, copier)
                return pack(plain, layout.bits)
            return value_of(entry, tensor, codes, copier)

        with Shards(folder, shards_of(planned, SHARD_BYTES)) as shards:
            shards.write(written)
            shards.finish()
    return config_section(layout, family.ignored(_left_out(whole.values(), steps)))


def config_section(layout: Rounding, ignore: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` section. `ignore` names the linear layers that are not rounded."""
    weights = {
        "num_bits": layout.bits,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if layout.group is None else "group",
        "group_size": layout.group,
    }
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": tokens if layout.activations else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": BYTES if layout.activations else PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignore,
    }


def section_of(params: Tree, family: Family, model: Stacked, *, as_integers: bool = True) -> dict[str, Any]:
    """Return the `quantization_config` section that `write_packed` or `write_scales` writes for these parameters.

    Args:
        params: The parameters, with fake-quantized weights, or their specs.
        family: The family, whose table names the tensors.
        model: The model.
        as_integers: Whether the weights are written as integers, or as floats with a record of the scales.

    Raises:
        UserError: With `as_integers`, a tensor has no integer form.
    """
    steps = scale_entries(params, family.table, model, as_integers=as_integers)
    unrounded = _left_out(entries(family.table, model.specs(), model.stacks), steps)
    return config_section(layout_of(params), family.ignored(unrounded))


def pack(codes: NDArray[Any], bits: int) -> NDArray[Any]:
    """Return rows of int32 with several codes each. 2^(bits-1) is added to a code; the first is in the lowest bits."""
    per_word = _WORD_BITS // bits
    rows, columns = codes.shape
    words = -(-columns // per_word)
    padded = np.zeros((rows, words * per_word), np.uint32)
    padded[:, :columns] = codes.astype(np.int32) + 2 ** (bits - 1)
    shifted = padded.reshape(rows, words, per_word) << (bits * np.arange(per_word, dtype=np.uint32))
    return np.bitwise_or.reduce(shifted, axis=-1).astype(np.uint32).view(np.int32)


def unpack(words: NDArray[Any], bits: int, columns: int) -> NDArray[Any]:
    """Return the codes that `pack` packed, as int8."""
    shifts = bits * np.arange(_WORD_BITS // bits, dtype=np.uint32)
    fields = (words.view(np.uint32)[:, :, None] >> shifts) & np.uint32(2**bits - 1)
    return (fields.reshape(len(words), -1)[:, :columns].astype(np.int32) - 2 ** (bits - 1)).astype(np.int8)


class Unpacked(Converted):
    """A checkpoint with integer weights, presented as if its matrices were float32.

    Raises:
        UserError: Codes and scales do not belong together.
    """

    def __init__(self, packed: Weights, bits: int) -> None:
        self._bits = bits
        super().__init__(packed)

    def view(self, name: str) -> NDArray[Any]:
        if not self.is_unpacked(name):
            return self._stored.view(name)
        stem = name.removesuffix(".weight")
        rows, columns = self._tensors[name].shape
        if f"{stem}.weight_packed" in self._stored:
            codes = unpack(self._stored.view(f"{stem}.weight_packed"), self._bits, columns)
        else:
            codes = self._stored.view(name)
        scale = self._stored.view(f"{stem}{SUFFIX}").astype(np.float32)
        numbers = codes.astype(np.float32).reshape(rows, scale.shape[1], -1) * scale[:, :, None]
        return np.asarray(numbers.reshape(rows, columns))

    def is_unpacked(self, name: str) -> bool:
        """Return whether a matrix is stored as integers."""
        return name.endswith(".weight") and f"{name.removesuffix('.weight')}{SUFFIX}" in self._stored

    @property
    def scales(self) -> Weights:
        """The tensors of the file, which include the scales under their own names."""
        return self._stored

    def _sources(self, name: str) -> tuple[str, ...]:
        stem = name.removesuffix(".weight")
        return f"{stem}.weight_packed", f"{stem}{SUFFIX}"

    def _presented(self) -> Iterator[tuple[str, TensorInfo]]:
        for name, info in self._stored.items():
            stem, _, kind = name.rpartition(".")
            if kind == "weight_scale":
                yield f"{stem}.weight", replace(info, dtype="F32", shape=self._shape(stem))
            elif kind not in ("weight_packed", "weight_shape") and not self.is_unpacked(name):
                yield name, info

    def _shape(self, stem: str) -> tuple[int, int]:
        """Return the shape of a matrix. Raise a UserError if its codes and scales do not fit it."""
        words, plain = self._stored.get(f"{stem}.weight_packed"), self._stored.get(f"{stem}.weight")
        given, scale = self._stored.get(f"{stem}.weight_shape"), self._stored[f"{stem}{SUFFIX}"]
        shape: tuple[int, ...] = ()
        if words is not None and given is not None and (given.dtype, given.shape) == ("I64", (2,)):
            shape = tuple(int(size) for size in self._stored.view(f"{stem}.weight_shape"))
            fits = (words.dtype, words.shape) == ("I32", (shape[0], -(-shape[1] * self._bits // _WORD_BITS)))
        else:
            shape = plain.shape if plain is not None else ()
            fits = plain is not None and plain.dtype == "I8" and len(shape) == 2
        groups = scale.shape[1] if len(scale.shape) == 2 else 0
        fits = fits and scale.dtype in READABLE and min(shape) > 0 and groups > 0
        if not fits or scale.shape[0] != shape[0] or shape[1] % groups:
            raise UserError(
                "E-WEIGHTS-004",
                f"the integers of {shown(stem)} in {self.folder} cannot be read",
                why="its codes and scales do not have the shapes and dtypes of one matrix",
                fix="export or download the folder again",
            )
        return shape[0], shape[1]


def opened(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """Return the tensors of the text model as floats. Integers, FP8 and MXFP4 values are converted when they are read.

    Args:
        weights: All tensors of a checkpoint. They are closed if an error is raised.
        config: Its config.json, which tells the format, and whether tensors belong to other parts than text.
    """
    try:
        wrapper = wrapper_of(config)
        if wrapper is not None:
            weights = Selection(weights, lambda name: not wrapper.is_other(name))
        packed, float8 = rounding_in(config.get(QUANTIZATION)), float8_in(config.get(QUANTIZATION))
        if packed is not None:
            return Unpacked(weights, packed.bits)
        if is_mxfp4(config.get(QUANTIZATION)):
            return DequantizedExperts(weights)
        return weights if float8 is None else Dequantized(weights, float8)
    except BaseException:
        weights.close()
        raise


def opened_snapshot(source: Snapshot) -> Weights:
    """Open the weights of a snapshot as floats: those of the text model."""
    return opened(source.open_weights(), source.config())


def float_dtypes(source: Snapshot, table: Iterable[Tensor], model: Stacked) -> dict[str, str]:
    """Return the float dtype of every tensor of a checkpoint. Integer matrices get the dtype of most other tensors."""
    with opened_snapshot(source) as weights:
        found = dtypes_of(weights, table, model)
        integers = [name for name in found if isinstance(weights, Unpacked) and weights.is_unpacked(name)]
    others = [dtype for name, dtype in found.items() if name not in integers]
    return {**found, **dict.fromkeys(integers, max(others, key=others.count))} if integers else found


@contextmanager
def weights_of(found: Pretrained) -> Iterator[tuple[Weights, Weights | None]]:
    """Open a checkpoint and yield its weights as floats and the tensors of its scales, or None without scales."""
    with ExitStack() as stack:
        weights = stack.enter_context(opened_snapshot(found.snapshot))
        if isinstance(weights, Unpacked):
            yield weights, weights.scales
        elif found.recorded is None:
            yield weights, None
        else:
            yield weights, stack.enter_context(open_weights(found.snapshot.folder / RECORD))


def write_scales(folder: Path, params: Tree, family: Family, model: Stacked) -> None:
    """Write the scales of a dense export to a separate folder, where other programs do not read them as weights."""
    steps = scale_entries(params, family.table, model, as_integers=False)
    if not steps:
        return
    (folder / RECORD).mkdir()
    _, scales = _arrays(params)
    planned = [Planned(name, "BF16", entry.shape) for name, entry in steps.items()]
    with (
        Copier(leaf.sharding for leaf in scales.values()) as copier,
        Shards(folder / RECORD, shards_of(planned, SHARD_BYTES)) as shards,
    ):
        shards.write(lambda tensor: value_of(steps[tensor.name], tensor, scales, copier))
        shards.finish()
    section = section_of(params, family, model, as_integers=False)
    write_json(folder / RECORD / "config.json", {QUANTIZATION: section})


def _arrays(params: Tree) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return all leaves by path, with codes in place of rounded weights, and the scales by the path of their weight."""

    def split(params: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        made = {path: one.codes() for path, one in rounded_weights(params).items()}
        coded = jax.tree_util.tree_map_with_path(
            lambda path, leaf: Dense(made[path_text(path)][0]) if isinstance(leaf, FakeQuantized) else leaf,
            params,
            is_leaf=is_weight,
        )
        return coded, {path: scale for path, (_, scale) in made.items()}

    coded, scales = jax.jit(split)(params)
    return {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(coded)}, scales


def _planned(
    entry: Entry, steps: Mapping[str, Entry], layout: Rounding, dtype: str | Mapping[str, str]
) -> list[Planned]:
    stem = entry.name.removesuffix(".weight")
    step = steps.get(f"{stem}.weight_scale")
    if step is None:
        return [Planned(entry.name, tensor_dtype(dtype, entry.name), entry.shape)]
    scale = Planned(step.name, "BF16", step.shape)
    if layout.activations:
        return [Planned(entry.name, "I8", entry.shape), scale]
    words = -(-entry.shape[1] * layout.bits // _WORD_BITS)
    return [
        Planned(f"{stem}.weight_packed", "I32", (entry.shape[0], words)),
        Planned(f"{stem}.weight_shape", "I64", (2,)),
        scale,
    ]


def _left_out(whole: Iterable[Entry], steps: Mapping[str, Entry]) -> list[str]:
    """Return the linear layers that are not rounded: the read-out, and those that are not in qat.targets."""
    matrices = [entry for entry in whole if len(entry.shape) == 2 and entry.pieces[0].path != "embed"]
    names = {entry.name.removesuffix(".weight") for entry in matrices}
    return sorted({name for name in names if f"{name}.weight_scale" not in steps} | {"lm_head"})
