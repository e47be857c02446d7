"""FP8 weights that are dequantized when they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.hub.files import shown
from forerun.hub.safetensors import TensorInfo, Weights, numpy_dtype
from forerun.models.scaled_floats import Float8

SCALE = ".weight_scale_inv"
_DROPPED = (SCALE, ".activation_scale")  # activations are not rounded in training
_SCALE_DTYPES = ("F32", "BF16", "F16")
_PART_BYTES = 1 << 25  # float32 values that are computed at one time


class Dequantized(Weights):
    """A checkpoint with FP8 weights, presented as if its matrices were bfloat16.

    A value is rounded to bfloat16 once, after the product in float32, as in transformers.

    Raises:
        UserError: A matrix and its scales do not belong together.
    """

    def __init__(self, stored: Weights, form: Float8) -> None:
        self.folder, self._stored, self._form = stored.folder, stored, form
        self._tensors = dict(self._plain())

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

    def release(self, name: str) -> None:
        for part in (name, _scale_name(name)):
            if part in self._stored:
                self._stored.release(part)

    def close(self) -> None:
        self._stored.close()

    def _plain(self) -> Iterator[tuple[str, TensorInfo]]:
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
