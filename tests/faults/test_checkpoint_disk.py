"""A disk that fills or turns read-only: a tmpfs of 8 MiB, which root may mount."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_assertions import raises_error
from needs import fill_disk, small_disk

from forerun.checkpoint.reader import Reader
from forerun.checkpoint.store import CheckpointStore, SaveFailed
from forerun.run.restore import needed_bytes, require_disk_space, saved_bytes

DISK_BYTES = 8 << 20

# After a failed write TensorStore calls back into Orbax's event loop, which is closed by then.
pytestmark = [pytest.mark.timing, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


def state_of(step: int) -> Any:
    random = np.random.default_rng(step)
    return {f"w{i}": jnp.asarray(random.standard_normal((128, 512), np.float32)) for i in range(4)}  # 1 MiB


LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, DISK_BYTES) as disk:
        yield disk
        gc.collect()  # what a failed write has left complains here, and not in whatever test comes next


def free_bytes(disk: Path) -> int:
    about = os.statvfs(disk)
    return about.f_bavail * about.f_frsize


def saved(store: CheckpointStore, step: int) -> SaveFailed | None:
    try:
        store.save(step, state_of(step), {})
        store.wait()
    except SaveFailed as error:
        return error
    return None


def tidied(store: CheckpointStore, disk: Path, free: int) -> None:
    """Removed as the next save would; what writes late does so once."""
    deadline = time.monotonic() + 300
    while free_bytes(disk) != free:
        assert time.monotonic() < deadline, [str(path) for path in disk.rglob("*")]
        store._remove_leftovers(store.fence, store._next - 1)
        time.sleep(0.05)


def assert_whole(folder: Path, step: int) -> None:
    found = Reader(folder).restore_newest(LIKE)
    assert found is not None
    assert (found.step, found.skipped) == (step, ())
    pairs = zip(jax.tree.leaves(found.state), jax.tree.leaves(state_of(step)), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_full_at_every_phase_of_a_save(disk: Path) -> None:
    folder = disk / "checkpoints"
    one = int(saved_bytes(LIKE))
    failures = late = 0
    with CheckpointStore(folder, keep=1) as store:
        store.save(1, state_of(1), {})
        store.wait()
        step = 1
        for leave in (0, 4096, 8192, 65536, one // 4, one // 2, one - 40960, one - 8192, one - 4096, one, 2 * one):
            ballast = fill_disk(disk, leave)
            before = free_bytes(disk)
            if (failure := saved(store, step + 1)) is None:
                step += 1
            else:
                failures += 1
                assert f"resumes from step {step}" in failure.fix
                if free_bytes(disk) != before:  # a writer that was still ending when the save had failed
                    late += 1
                    tidied(store, disk, before)
            assert_whole(folder, step)
            ballast.unlink()
            step += 1
            store.save(step, state_of(step), {})
            store.wait()
            assert_whole(folder, step)
    assert failures >= 6
    assert late <= failures // 2, "a failed save leaves nothing behind, but for what nobody can wait for"
    assert step > 12, "with room enough it is saved"


def test_a_process_that_starts_on_a_full_disk_finds_its_checkpoint(disk: Path) -> None:
    """Even if not a byte can be written; it can go on when there is room."""
    folder = disk / "checkpoints"
    with CheckpointStore(folder, keep=1) as store:
        store.save(1, state_of(1), {})
    ballast = fill_disk(disk)
    assert_whole(folder, 1)
    with raises_error("E-CHECKPOINT-010") as error:
        CheckpointStore(folder, keep=1)
    assert "No space left" in error.value.why
    ballast.unlink()
    with CheckpointStore(folder, keep=1) as store:
        store.save(2, state_of(2), {})
    assert_whole(folder, 2)


def test_a_disk_that_turns_read_only(disk: Path) -> None:
    folder = disk / "checkpoints"
    with CheckpointStore(folder, keep=2) as store:
        store.save(1, state_of(1), {})
        store.wait()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        failure = saved(store, 2)
        assert failure is not None
        assert "Read-only" in failure.why
        assert_whole(folder, 1)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        store.save(2, state_of(2), {})
        store.wait()
        assert_whole(folder, 2)


def test_the_room_is_asked_for_as_it_is_needed(disk: Path) -> None:
    """With as much as is said to be needed, a run goes on for ever; with a tenth less it is refused at the start."""
    folder = disk / "checkpoints"
    needed = int(needed_bytes(LIKE, keep=2))
    ballast = fill_disk(disk, needed - needed // 10)
    with raises_error("E-CHECKPOINT-009", "3."):
        require_disk_space(folder, needed)
    ballast.unlink()
    fill_disk(disk, needed + needed // 50)
    require_disk_space(folder, needed)
    with CheckpointStore(folder, keep=2) as store:
        for step in range(1, 8):
            store.save(step, state_of(step), {"data": "digest"})
        store.wait()
        require_disk_space(folder, needed)
    assert_whole(folder, 7)
