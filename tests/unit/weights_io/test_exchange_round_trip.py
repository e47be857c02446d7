"""Weights read onto the devices are what plain numpy makes of the files, and written again they are the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

from forerun.hub.safetensors import open_weights
from forerun.weights_io import leaves, write
from forerun.weights_io.match import dtypes_of
from forerun.weights_io.read import read_params
from forerun.weights_io.write import write_params

BITS = {2: np.uint16, 4: np.uint32}


@pytest.fixture(autouse=True)
def _tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even these small tensors into several leaves, turned where they must be."""
    monkeypatch.setattr(leaves, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(leaves, "SMALLEST_TURN", 64)
    monkeypatch.setattr(leaves, "IN_FLIGHT_BYTES", 1000)


@pytest.fixture
def _as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled updates that other devices use, here on CPU devices."""
    monkeypatch.setattr(leaves, "on_cpu", lambda sharding: False)
    monkeypatch.setattr(write, "on_cpu", lambda sharding: False)


def by_path(tree: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    bits = BITS[one.dtype.itemsize]
    return one.dtype == other.dtype and one.shape == other.shape and bool((one.view(bits) == other.view(bits)).all())


@pytest.mark.parametrize("leaf_dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_parameters_are_those_of_plain_numpy(kind: Any, mesh: Mesh, save: Callable[..., Path], leaf_dtype: Any) -> None:
    check_params(kind, mesh, save, leaf_dtype)


@pytest.mark.usefixtures("_as_on_accelerators")
def test_parameters_on_accelerators_are_those_of_plain_numpy(kind: Any, cube: Mesh, save: Callable[..., Path]) -> None:
    check_params(kind, cube, save, jnp.float32)


def check_params(kind: Any, mesh: Mesh, save: Callable[..., Path], leaf_dtype: Any) -> None:
    tensors = kind.tensors("BF16")
    wanted = kind.wanted(mesh, leaf_dtype)
    with open_weights(save(tensors)) as weights:
        params = read_params(weights, kind.table, kind.model, wanted)

    expected = kind.params(tensors)
    found, shapes = by_path(params), by_path(wanted)
    assert set(found) == set(expected) == set(shapes)
    for path, array in found.items():
        assert array.sharding == shapes[path].sharding, path
        assert same_bits(np.asarray(array), np.ascontiguousarray(expected[path].astype(leaf_dtype))), path


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_round_trip_is_exact_to_the_bit(
    kind: Any, mesh: Mesh, save: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    check_round_trip(kind, mesh, save, tmp_path, dtype)


@pytest.mark.usefixtures("_as_on_accelerators")
def test_round_trip_on_accelerators_is_exact_to_the_bit(
    kind: Any, cube: Mesh, save: Callable[..., Path], tmp_path: Path
) -> None:
    check_round_trip(kind, cube, save, tmp_path, "BF16")


def check_round_trip(kind: Any, mesh: Mesh, save: Callable[..., Path], tmp_path: Path, dtype: str) -> None:
    original = save(kind.tensors(dtype))
    with open_weights(original) as weights:
        params = read_params(weights, kind.table, kind.model, kind.wanted(mesh, jnp.float32))
        dtypes = dtypes_of(weights, kind.table, kind.model)
    write_params(tmp_path / "again", params, kind.table, kind.model, dtypes)

    before, after = load_file(original / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert set(before) == set(after)
    assert [name for name in before if not same_bits(before[name], after[name])] == []


def test_each_tensor_keeps_a_dtype_of_its_own(
    gpt2_checkpoint: Any, one_device: Mesh, save: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = gpt2_checkpoint.tensors("BF16")
    for name, dtype in (("transformer.wte.weight", np.float32), ("transformer.ln_f.weight", np.float16)):
        tensors[name] = gpt2_checkpoint.tensors("F32")[name].astype(dtype)
    with open_weights(save(tensors)) as weights:
        dtypes = dtypes_of(weights, gpt2_checkpoint.table, gpt2_checkpoint.model)
        wanted = gpt2_checkpoint.wanted(one_device, jnp.float32)
        params = read_params(weights, gpt2_checkpoint.table, gpt2_checkpoint.model, wanted)
    write_params(tmp_path / "again", params, gpt2_checkpoint.table, gpt2_checkpoint.model, dtypes)
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert [name for name in tensors if not same_bits(tensors[name], after[name])] == []


def test_float64_is_rounded_once(gpt2_checkpoint: Any, one_device: Mesh, save: Callable[..., Path]) -> None:
    tensors = {name: value.astype(np.float64) for name, value in gpt2_checkpoint.tensors("F32").items()}
    tensors["transformer.wte.weight"][0, 0] = 1 / 3
    wanted = gpt2_checkpoint.wanted(one_device, jnp.float32)
    with open_weights(save(tensors)) as weights:
        params = read_params(weights, gpt2_checkpoint.table, gpt2_checkpoint.model, wanted)
    assert np.asarray(params.embed)[0, 0] == np.float32(1 / 3)
    assert np.array_equal(np.asarray(params.embed), tensors["transformer.wte.weight"].astype(np.float32))


def test_arrays_do_not_depend_on_the_file(gpt2_checkpoint: Any, mesh: Mesh, save: Callable[..., Path]) -> None:
    """No view of a mapped file may live on in an array: an export may write over the file."""
    tensors = gpt2_checkpoint.tensors("F32")
    folder = save(tensors)
    wanted = gpt2_checkpoint.wanted(mesh, jnp.float32)
    with open_weights(folder) as weights:
        params = read_params(weights, gpt2_checkpoint.table, gpt2_checkpoint.model, wanted)
    with open(folder / "model.safetensors", "r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\0" * size)
    for path, expected in gpt2_checkpoint.params(tensors).items():
        assert np.array_equal(np.asarray(by_path(params)[path]), expected), path


def test_arrays_may_be_donated(gpt2_checkpoint: Any, mesh: Mesh, save: Callable[..., Path]) -> None:
    """Replicas share host memory; a training step that overwrites its state must still count once per device."""
    tensors = gpt2_checkpoint.tensors("F32")
    wanted = gpt2_checkpoint.wanted(mesh, jnp.float32)
    with open_weights(save(tensors)) as weights:
        params = read_params(weights, gpt2_checkpoint.table, gpt2_checkpoint.model, wanted)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    after = by_path(step(step(params)))
    for path, expected in gpt2_checkpoint.params(tensors).items():
        for shard in after[path].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), expected[shard.index] + 1 + 1)
