"""The writer of a save, and what it leaves behind. The oracle for the content is numpy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as orbax

from forerun.checkpoint.saving import Writer, saving_context
from forerun.reporter import SILENT
from forerun.storage.folder import LocalFolder
from forerun.storage.retries import RetrySchedule, StorageUnavailable, with_retries

T = TypeVar("T")


class Flaky(LocalFolder):
    """A folder that does not answer the first `failures` times, and is tried again like a bucket."""

    def __init__(self, folder: Path, failures: int) -> None:
        super().__init__(folder)
        self.failures = failures

    schedule = RetrySchedule(first_seconds=0.0, total_seconds=60.0)

    def with_retries(self, call: Callable[[], T]) -> T:
        return with_retries(call, RetrySchedule(first_seconds=0.0), SILENT)

    def require_folders(self, name: str) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageUnavailable("E-DATA-172", "the folder does not answer", why="a test", fix="")
        super().require_folders(name)


def folder_names() -> Callable[[], str]:
    numbers = count(1)
    return lambda: f"7-1-{next(numbers)}"


def test_only_one_host_with_a_bucket_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def retries(place: LocalFolder) -> bool:
        return Writer(place, saving_context(LocalFolder(Path())), folder_names()).retries

    disk, bucket = LocalFolder(tmp_path), Flaky(tmp_path, 0)
    assert (retries(disk), retries(bucket)) == (False, True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert (retries(disk), retries(bucket)) == (False, False)


@pytest.mark.parametrize("failures", [0, 2])
def test_a_retry_writes_the_copy_into_a_new_folder(tmp_path: Path, failures: int) -> None:
    """The state's buffers are deleted before the write, as a step that donates them does."""
    state = {"x": jnp.arange(16.0)}
    writer = Writer(Flaky(tmp_path, failures), saving_context(LocalFolder(Path())), folder_names())
    writer.start(state)
    jax.block_until_ready(writer._copy)
    state["x"].delete()
    assert writer.write() == f"7-1-{failures + 1}" == writer.folder
    assert (writer.tries, writer._copy) == (failures + 1, None)
    assert [path.name for path in tmp_path.iterdir()] == [writer.folder]
    like = {"x": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}
    restored: Any = orbax.load(tmp_path / writer.folder, like)
    np.testing.assert_array_equal(restored["x"], np.arange(16, dtype=np.float32))


def test_the_copy_is_released_after_a_failure(tmp_path: Path) -> None:
    place = Flaky(tmp_path, 0)
    writer = Writer(place, saving_context(LocalFolder(Path())), lambda: "file/folder")
    (tmp_path / "file").write_text("in the way")
    writer.start({"x": jnp.ones(4)})
    with pytest.raises(OSError, match="file"):
        writer.write()
    assert writer._copy is None
    assert writer.tries == 1
