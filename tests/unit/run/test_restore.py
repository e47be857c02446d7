from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from error_assertions import raises_error
from jax.sharding import NamedSharding, PartitionSpec

from forerun.checkpoint.store import CheckpointStore
from forerun.run.restore import needed_bytes, require_disk_space, saved_bytes
from forerun.units import GIB


def taken_bytes(folder: Path) -> int:
    """On the disk, in blocks."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def states() -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("fsdp",))
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    alone = {f"w{i}": jnp.full((300, 1024), i, jnp.bfloat16) for i in range(4)}
    many = {f"w{i}": jnp.zeros((64, 512), jnp.float32) for i in range(100)}
    return {
        "zeros, which compression would hide": jnp.zeros((1024, 1024), jnp.float32),
        "few": alone | {"step": jnp.int32(1), "key": jax.random.key_data(jax.random.key(0))},
        "many": many,
        "split over devices": {name: jax.device_put(x, split) for name, x in many.items()},
        "on every device": {name: jax.device_put(x, whole) for name, x in alone.items()},
    }


@pytest.mark.parametrize("name", states())
def test_a_save_takes_what_was_said(tmp_path: Path, name: str) -> None:
    state = {"state": states()[name]}
    with CheckpointStore(tmp_path, keep=2) as store:
        for step in (1, 2, 3):
            store.save(step, state, {"data": "digest"})
        store.wait()
    assert saved_bytes(jax.eval_shape(lambda: state)) == pytest.approx(taken_bytes(tmp_path) / 2, rel=0.02)
    assert needed_bytes(state, keep=2) == 3 * saved_bytes(state)


def test_a_key_counts_as_its_words() -> None:
    assert saved_bytes(jax.random.key(0)) == saved_bytes(jnp.zeros(2, jnp.uint32))


def test_room_is_asked_for_before_it_is_needed(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    require_disk_space(tmp_path / "not" / "there" / "yet", free // 2)
    with raises_error("E-CHECKPOINT-009") as error:
        require_disk_space(tmp_path / "not" / "there" / "yet", free * 2 + GIB)
    assert "checkpoint.keep" in error.value.fix


def test_what_is_there_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1-1-1").mkdir()
    (tmp_path / "1-1-1" / "file").write_bytes(bytes(4000))
    monkeypatch.setattr("forerun.storage.folder.LocalFolder.free_bytes", lambda _: 1000)
    require_disk_space(tmp_path, 1000 + 4096)  # a file takes whole blocks
    with raises_error("E-CHECKPOINT-009", "4.98"):
        require_disk_space(tmp_path, 1000 + 4097)
