"""The tensors of a multimodal checkpoint beside those of its text model. An export copies them one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.hub.safetensors import Selection, Weights, equal_bytes
from forerun.hub.snapshot import Snapshot
from forerun.models.families.wrapper import wrapper_of
from forerun.models.keys import unused_names
from forerun.models.pretrained import read_snapshot
from forerun.models.registry import model_for
from forerun.models.rounding import QUANTIZATION
from forerun.models.scaled_floats import float8_in
from forerun.weights_io.float8 import Dequantized
from forerun.weights_io.shards import Planned


@contextmanager
def open_others(source: Snapshot) -> Iterator[Weights | None]:
    """Open the tensors that the text model does not use, and yield them, or None for a text model.

    Gemma 4 E2B has keys and values in its text model, too, that no layer uses. FP8 tensors are presented as bfloat16,
    because an export has no section on FP8.
    """
    config = source.config()
    wrapper, float8 = wrapper_of(config), float8_in(config.get(QUANTIZATION))
    if wrapper is None:
        yield None
        return
    found = read_snapshot(source, f"{source.name}/config.json")
    model = model_for(found.config)
    unused = unused_names(found.family.table, model.specs(), model.stacks)
    with source.open_weights() as weights:
        others: Weights = Selection(weights, lambda name: wrapper.is_other(name) or name in unused)
        yield others if float8 is None else Dequantized(others, float8)


def planned_copies(others: Weights | None) -> list[Planned]:
    """Return the tensors that are copied, with their names, dtypes and shapes."""
    return [Planned(name, info.dtype, info.shape) for name, info in (others or {}).items()]


def copied(others: Weights, tensor: Planned) -> NDArray[Any]:
    """Return the value of a tensor that is copied. Its pages of the mapped file are released."""
    value = np.array(others.view(tensor.name))
    others.release(tensor.name)
    return value


def first_difference(others: Weights, written: Weights) -> str | None:
    """Return the name of a tensor whose dtype, shape or bytes differ in `written`, or None if all are equal."""
    if set(others) != set(written):
        return min(set(others) ^ set(written))
    return next((name for name in others if not _is_equal(others, written, name)), None)


def _is_equal(others: Weights, written: Weights, name: str) -> bool:
    if (others[name].dtype, others[name].shape) != (written[name].dtype, written[name].shape):
        return False
    same = equal_bytes(others.view(name), written.view(name))
    others.release(name)
    written.release(name)
    return same
