"""The files that are written: cut, named, indexed, readable by the safetensors library, and never half there."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_assertions import raises_error
from jax.sharding import Mesh
from safetensors import safe_open

from forerun.errors import UserError
from forerun.hub.safetensors import open_weights
from forerun.weights_io.shards import Planned, Shards, header_bytes, shards_of
from forerun.weights_io.write import write_params


def params_of(kind: Any, mesh: Mesh, value: float = 1.0) -> Any:
    return jax.tree.map(
        lambda s: jax.device_put(np.full(s.shape, value, s.dtype), s.sharding), kind.wanted(mesh, jnp.float32)
    )


def test_files_are_cut_named_and_indexed(gpt2_checkpoint: Any, one_device: Mesh, tmp_path: Path) -> None:
    kind, params = gpt2_checkpoint, params_of(gpt2_checkpoint, one_device)
    paths = write_params(tmp_path, params, kind.table, kind.model, "bfloat16", shard_bytes=4000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert sorted(path.name for path in paths) == names
    count = len(names) - 1
    assert count > 2
    assert names == [
        *(f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    held = {}
    for name in names[:-1]:
        with safe_open(tmp_path / name, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            held |= dict.fromkeys(file.keys(), name)
    assert index["weight_map"] == held
    assert set(held) == set(kind.shapes)
    assert index["metadata"]["total_size"] == sum(2 * int(np.prod(shape)) for shape in kind.shapes.values())
    with open_weights(tmp_path) as weights:
        assert {name: info.shape for name, info in weights.items()} == kind.shapes


def test_no_file_exceeds_its_limit_unless_one_tensor_does() -> None:
    tensors = [Planned(str(n), "F32", (size,)) for n, size in enumerate([10, 10, 40, 5, 5, 5, 11])]
    files = shards_of(tensors, 100)
    assert [[tensor.name for tensor in file] for file in files] == [["0", "1"], ["2"], ["3", "4", "5"], ["6"]]


def test_wide_elements_come_first_in_a_file() -> None:
    tensors = [
        Planned("a", "BF16", (3,)),
        Planned("b", "F32", (2,)),
        Planned("c", "F16", (1,)),
        Planned("d", "F64", ()),
    ]
    (file,) = shards_of(tensors, 100)
    assert [tensor.name for tensor in file] == ["d", "b", "a", "c"]


def test_the_header_is_what_the_format_says() -> None:
    raw = header_bytes([Planned("a", "BF16", (3, 2)), Planned("b", "F32", ())])
    assert len(raw) % 8 == 0
    assert int.from_bytes(raw[:8], "little") == len(raw) - 8
    assert json.loads(raw[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [3, 2], "data_offsets": [0, 12]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
    }


def test_a_failure_leaves_no_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"old")
    tensors = [Planned("a", "F32", (2,)), Planned("b", "F32", (2,))]

    def value_of(tensor: Planned) -> Any:
        if tensor.name == "b":
            raise RuntimeError("device lost")
        return np.zeros(2, np.float32)

    with pytest.raises(RuntimeError, match="device lost"), Shards(tmp_path, shards_of(tensors, 100)) as shards:
        shards.write(value_of)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("model.safetensors", b"old")]


def test_a_full_disk_is_told_with_the_room_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    tensors = shards_of([Planned("a", "F32", (1024, 3))], 10**6)
    with pytest.raises(UserError) as caught, Shards(tmp_path, tensors) as shards:
        shards.write(lambda tensor: np.zeros((1024, 3), np.float32))
    assert "No space left on device" in caught.value.why
    assert "12.0 KiB" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_is_not_as_announced_is_our_mistake(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="announced"),
        Shards(tmp_path, shards_of([Planned("a", "F32", (2, 3))], 100)) as shards,
    ):
        shards.write(lambda tensor: np.zeros((3, 2), np.float32).T)


def test_values_beyond_float16_are_refused(gpt2_checkpoint: Any, one_device: Mesh, tmp_path: Path) -> None:
    kind, params = gpt2_checkpoint, params_of(gpt2_checkpoint, one_device, 70_000.0)
    with raises_error("E-WEIGHTS-010", "float16"):
        write_params(tmp_path, params, kind.table, kind.model, "float16")
    assert list(tmp_path.iterdir()) == []
    write_params(tmp_path, params, kind.table, kind.model, "float32")


def test_weights_are_not_written_as_integers(gpt2_checkpoint: Any, one_device: Mesh, tmp_path: Path) -> None:
    kind, params = gpt2_checkpoint, params_of(gpt2_checkpoint, one_device)
    with raises_error("E-WEIGHTS-011", "I8"):
        write_params(tmp_path, params, kind.table, kind.model, "I8")
