"""An owner that was replaced cannot commit, whatever it finds under its next number."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from forerun.checkpoint.log import Commit, Log
from forerun.checkpoint.store import CheckpointStore, TakenOver
from forerun.storage.folder import LocalFolder

STATE = {"x": jnp.ones(4)}


@pytest.mark.parametrize("folder", ["9-2-1", "5-1-1"], ids=["another folder", "the folder of this save"])
def test_a_commit_of_another_owner_under_the_next_number_refuses_the_save(tmp_path: Path, folder: str) -> None:
    zombie = CheckpointStore(tmp_path, keep=1, owner="zombie")
    other = Commit(zombie.fence + 1, zombie.fence + 1, 9, folder, {}, {"by": "other"})
    assert Log(LocalFolder(tmp_path)).commit(other)
    zombie.save(5, STATE, {"by": "zombie"})
    with pytest.raises(TakenOver):
        zombie.wait()
    assert Log(LocalFolder(tmp_path)).commits() == [other]


def test_its_own_commit_under_the_next_number_counts(tmp_path: Path) -> None:
    """A write may succeed although the disk reported a failure."""
    store = CheckpointStore(tmp_path, keep=2)
    own = Commit(store.fence + 1, store.fence, 4, "4-1-9", {}, {})
    assert Log(LocalFolder(tmp_path)).commit(own)
    store.save(5, STATE, {})
    store.wait()
    assert [(commit.number, commit.step) for commit in Log(LocalFolder(tmp_path)).commits()] == [(2, 4), (3, 5)]
