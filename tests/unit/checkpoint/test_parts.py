from __future__ import annotations

import random
from pathlib import Path

import jax.numpy as jnp
import pytest

from forerun.checkpoint.log import Log
from forerun.checkpoint.parts import FOLDER, PARTS, FilePart, read_parts, recorded_parts, write_parts
from forerun.checkpoint.store import CheckpointStore, SaveFailed
from forerun.storage.folder import Folder, LocalFolder

STATE = {"x": jnp.ones(4)}


class Content:
    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def read(self, start: int, end: int) -> bytes:
        return self._content[start:end]


def test_many_saves_of_a_growing_file_leave_few_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.checkpoint.parts.LARGEST_BYTES", 1 << 20)
    place, chance = LocalFolder(tmp_path), random.Random(0)
    content, parts, written = b"", [], 0
    for save in range(200):
        content += chance.randbytes(chance.randrange(40))
        before, parts = parts, write_parts(place, f"{save}-1-{save}", "metrics", Content(content), parts)
        written += sum(part.bytes for part in set(parts) - set(before))
        assert b"".join(map(bytes, read_parts(place, parts))) == content
    assert len(parts) <= 12
    assert written < 10 * len(content)


def test_a_part_is_at_most_as_large_as_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.checkpoint.parts.LARGEST_BYTES", 100)
    place, content = LocalFolder(tmp_path), random.Random(0).randbytes(1234)
    parts = write_parts(place, "1-1-1", "ledger", Content(content[:1000]), [])
    parts = write_parts(place, "2-1-2", "ledger", Content(content), parts)
    assert max(part.bytes for part in parts) == 100
    assert b"".join(map(bytes, read_parts(place, parts))) == content


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "files/../../x", "files/a", "5-1-1/state"])
def test_a_record_cannot_name_other_files(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a part"):
        recorded_parts({PARTS: {"metrics": [[name, 3]]}}, "metrics")


def attach(content: bytes, parts: list[FilePart]) -> object:
    def attached(place: Folder, folder: str) -> dict[str, list[FilePart]]:
        parts[:] = write_parts(place, folder, "metrics", Content(content), parts)
        return {"metrics": parts}

    return attached


def test_parts_are_committed_with_their_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails between its parts and its record leaves nothing that counts; the next owner removes it."""
    store, parts = CheckpointStore(tmp_path, keep=1), list[FilePart]()
    store.save(1, STATE, {"a": 1}, attach(b"one", parts))
    store.wait()
    committed = recorded_parts(store.record(1), "metrics")
    assert store.record(1)["a"] == 1
    assert b"".join(map(bytes, read_parts(LocalFolder(tmp_path), committed))) == b"one"

    with monkeypatch.context() as patch:
        patch.setattr(Log, "commit", lambda log, commit: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        store.save(2, STATE, {}, attach(b"one, two", parts))
        with pytest.raises(SaveFailed):
            store.wait()
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    with CheckpointStore(tmp_path, keep=1) as other:
        assert other.newest() == 1
        assert [f"{FOLDER}/{path.name}" for path in (tmp_path / FOLDER).iterdir()] == [part.name for part in committed]


def test_parts_stay_as_long_as_a_kept_checkpoint_names_them(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=2) as store:
        parts, content = list[FilePart](), b""
        for step in range(1, 8):
            content += b"x" * step
            store.save(step, STATE, {}, attach(content, parts))
        store.wait()
        named = {part.name for step in (6, 7) for part in recorded_parts(store.record(step), "metrics")}
        assert {f"{FOLDER}/{path.name}" for path in (tmp_path / FOLDER).iterdir()} == named
        for step in (6, 7):
            size = sum(range(step + 1))
            assert sum(part.bytes for part in recorded_parts(store.record(step), "metrics")) == size
