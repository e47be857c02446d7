"""FP8 and MXFP4 weights that are dequantized when they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.hub.files import shown
from forerun.hub.safetensors import TensorInfo, Weights, numpy_dtype
from forerun.models.quantization_config import Float8

SCALE = ".weight_scale_inv"
_DROPPED = (SCALE, ".activation_scale")  # activations are not rounded in training
_SCALE_DTYPES = ("F32", "BF16", "F16")
_PART_BYTES = 1 << 25  # float32 values that are computed at one time


class Converted(Weights):
    """A checkpoint that presents some of its tensors in another form. It converts them when they are read."""

    def __init__(self, stored: Weights) -> None:
        self.folder, self._stored = stored.folder, stored
        self._tensors = dict(self._presented())

    def release(self, name: str) -> None:
        for stored_name in (name, *self._sources(name)):
            if stored_name in self._stored:
                self._stored.release(stored_name)

    def close(self) -> None:
        self._stored.close()

    def _presented(self) -> Iterator[tuple[str, TensorInfo]]:
        """Yield the tensors in the form in which they are presented. Raise a UserError if one is damaged."""
        raise NotImplementedError

    def _sources(self, name: str) -> tuple[str, ...]:
        """Return the names of stored tensors from which a tensor is converted."""
        raise NotImplementedError


class Dequantized(Converted):
    """A checkpoint with FP8 weights, presented as if its matrices were bfloat16.

    A value is rounded to bfloat16 once, after the product in float32, as in transformers.

    Raises:
        UserError: A matrix and its scales do not belong together.
    """

    def __init__(self, stored: Weights, form: Float8) -> None:
        self._form = form
        super().__init__(stored)

    def view(self, name: str) -> NDArray[Any]:
        if not self.is_float8(name):
            return self._stored.view(name)
        value, scale = self._stored.view(name), self._stored.view(_scale_name(name)).astype(np.float32)
        made = np.empty(value.shape, numpy_dtype("BF16"))
        height, width = self._form.block or value.shape
        scale = np.atleast_2d(scale)
        # A few rows at a time: the matrix in float32 would need four times the memory of the file.
        rows = max(1, _PART_BYTES // (4 * value.shape[1]))
        for start in range(0, len(value), rows):
            part = value[start : start + rows].astype(np.float32)
            factors = scale[np.arange(start, start + len(part)) // height]
            part *= np.repeat(factors, width, axis=1)[:, : part.shape[1]]
            made[start : start + rows] = part.astype(made.dtype)
        return made

    def is_float8(self, name: str) -> bool:
        """Return whether a matrix is stored as FP8."""
        return name.endswith(".weight") and name in self._stored and self._stored[name].dtype == "F8_E4M3"

    def _sources(self, name: str) -> tuple[str, ...]:
        return (_scale_name(name),)

    def _presented(self) -> Iterator[tuple[str, TensorInfo]]:
        for name, info in self._stored.items():
            if self.is_float8(name):
                self._require_scales(name)
                yield name, replace(info, dtype="BF16", end=info.begin + 2 * info.data_bytes)
            elif not name.endswith(_DROPPED):
                yield name, info

    def _require_scales(self, name: str) -> None:
        """Raise a UserError if the scales of a matrix do not fit it."""
        shape, scale, block = self._stored[name].shape, self._stored.get(_scale_name(name)), self._form.block
        if len(shape) == 2 and min(shape) > 0 and scale is not None and scale.dtype in _SCALE_DTYPES:
            grid = tuple(-(-size // part) for size, part in zip(shape, block or shape, strict=True))
            if scale.shape == grid or (block is None and math.prod(scale.shape) == 1):
                return
        found = f"{scale.dtype}{list(scale.shape)}" if scale is not None else "missing"
        raise UserError(
            "E-WEIGHTS-030",
            f"the FP8 values of {shown(name)} in {self.folder} cannot be read",
            why=f"it is {list(shape)}, its scales are {found}, and config.json says {self._form}",
            fix="download the folder again, or use the checkpoint in bfloat16",
        )


def _scale_name(name: str) -> str:
    return name.removesuffix(".weight") + SCALE


# ---- MXFP4 weights of experts that are dequantized when they are read ----
# X experts, O outputs, I inputs. A parameter has its inputs before its outputs, [X, I, O]. The file has `_blocks` [X,
# O, I / 32, 16], each byte with two values, and `_scales` [X, O, I / 32].


BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16  # of 32 values
_NOT_A_NUMBER = 255  # this scale, in e8m0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1; the highest bit is the sign


class DequantizedExperts(Converted):
    """A checkpoint with MXFP4 parameters, presented as if they were bfloat16.

    A value is a product in float32, rounded to bfloat16, as in transformers.

    Raises:
        UserError: The values of a parameter and its scales do not belong together.
    """

    def view(self, name: str) -> NDArray[Any]:
        if not self.is_mxfp4(name):
            return self._stored.view(name)
        blocks, scales = self._stored.view(name + BLOCKS), self._stored.view(name + SCALES)
        if (scales == _NOT_A_NUMBER).any():
            raise self._error(name, "a scale is not a number")
        made = np.empty((*blocks.shape[:2], blocks.shape[2] * 2 * _BLOCK_BYTES), numpy_dtype("BF16"))
        pairs = made.view(np.uint32).reshape(blocks.shape)
        # One expert at a time: the indices need twice the memory of the file.
        for expert, (own, steps) in enumerate(zip(blocks, scales, strict=True)):
            np.take(_pairs(), steps[..., None].astype(np.uint16) << 8 | own, out=pairs[expert], mode="clip")
        return made.swapaxes(1, 2)

    def is_mxfp4(self, name: str) -> bool:
        """Return whether a parameter is stored as MXFP4."""
        return name + BLOCKS in self._stored

    def _sources(self, name: str) -> tuple[str, ...]:
        return name + BLOCKS, name + SCALES

    def _presented(self) -> Iterator[tuple[str, TensorInfo]]:
        for name, info in self._stored.items():
            plain = name.removesuffix(BLOCKS)
            if name.endswith(BLOCKS):
                shape = self._shape(plain)
                yield plain, replace(info, dtype="BF16", shape=shape, end=info.begin + 4 * info.data_bytes)
            elif not name.endswith(SCALES):
                yield name, info

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter. Raise a UserError if its scales do not fit it."""
        blocks, scales = self._stored[name + BLOCKS], self._stored.get(name + SCALES)
        if scales is not None and (blocks.dtype, scales.dtype) == ("U8", "U8") and len(blocks.shape) == 4:
            experts, outputs, groups, size = blocks.shape
            if size == _BLOCK_BYTES and scales.shape == (experts, outputs, groups):
                return experts, groups * 2 * _BLOCK_BYTES, outputs
        found = f"{scales.dtype}{list(scales.shape)}" if scales is not None else "missing"
        raise self._error(name, f"its blocks are {blocks.dtype}{list(blocks.shape)}, its scales are {found}")

    def _error(self, name: str, why: str) -> UserError:
        return UserError(
            "E-WEIGHTS-033",
            f"the MXFP4 values of {shown(name)} in {self.folder} cannot be read",
            why=why,
            fix="download the folder again, or use the checkpoint in bfloat16",
        )


@cache
def _pairs() -> NDArray[np.uint32]:
    """Return the two bfloat16 values of each scale and byte, as one number at 256 * scale + byte.

    The value in the low bits of a byte comes first.
    """
    values = np.array([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], np.float32)
    steps = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(np.float32)
    codes = np.arange(256)
    both = values[np.stack((codes & 15, codes >> 4), axis=-1)]
    with np.errstate(over="ignore"):  # the two largest scales have products that float32 cannot represent
        rounded = (both * steps[:, None, None]).astype(numpy_dtype("BF16"))
    return rounded.view(np.uint32).reshape(-1)
