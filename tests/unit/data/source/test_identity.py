from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from error_assertions import raises_error

from forerun.config.schema import Part
from forerun.data.source.files import File
from forerun.data.source.identity import MEMO_BYTES, identities
from forerun.data.source.sources import open_source


@pytest.fixture
def memo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "forerun" / "files.json"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose bytes were read."""
    names: list[str] = []
    plain = File.open

    def opened(file: File) -> Any:
        names.append(Path(file.name).name)
        return plain(file)

    monkeypatch.setattr(File, "open", opened)
    return names


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds after every file was written."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 10)


def sha256(raw: bytes) -> str:
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def local(*paths: Path) -> list[File]:
    return [File(str(path), "jsonl") for path in paths]


def test_a_local_file_is_known_by_its_bytes_as_they_lie(tmp_path: Path, memo: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(b"not even packed")
    found = open_source(Part(path=str(tmp_path))).identities()
    assert found == [sha256(b'{"text": "a"}\n'), sha256(b"not even packed")]
    assert not memo.exists()  # small files are not worth remembering


@pytest.mark.usefixtures("later")
def test_a_large_file_is_read_once(tmp_path: Path, memo: Path, read: list[str]) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(b"x" * MEMO_BYTES)
    small.write_bytes(b"y")
    wanted = [sha256(b"x" * MEMO_BYTES), sha256(b"y")]
    assert identities(local(large, small)) == wanted
    assert sorted(read) == ["large", "small"]
    read.clear()
    assert identities(local(large, small)) == wanted
    assert read == ["small"]
    assert sorted(path.name for path in memo.parent.iterdir()) == ["files.json"]


@pytest.mark.usefixtures("later")
def test_a_file_that_changed_is_read_again_even_with_its_old_size_and_time(tmp_path: Path, memo: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * MEMO_BYTES)
    about = path.stat()
    identities(local(path))
    assert memo.exists()
    path.write_bytes(b"y" * MEMO_BYTES)
    set_back(path, about)
    assert identities(local(path)) == [sha256(b"y" * MEMO_BYTES)]
    path.rename(tmp_path / "old")
    (tmp_path / "new").write_bytes(b"z" * MEMO_BYTES)
    (tmp_path / "new").rename(path)
    assert identities(local(path)) == [sha256(b"z" * MEMO_BYTES)]


def set_back(path: Path, about: os.stat_result) -> None:
    """The time of writing; the time of change is new, at the latest with the next tick of the kernel's clock."""
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    while path.stat().st_ctime_ns == about.st_ctime_ns:
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def test_a_file_that_was_written_just_now_is_not_remembered(
    tmp_path: Path, memo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * MEMO_BYTES)
    written = path.stat().st_ctime
    monkeypatch.setattr(time, "time", lambda: written + 1)  # however long the writing and the reading take here
    identities(local(path))
    assert not memo.exists()
    monkeypatch.setattr(time, "time", lambda: written + 10)
    identities(local(path))
    assert memo.exists()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '"x"', '{"PATH": 1}', '{"PATH": []}', '{"PATH": [1, 2]}', "[" * 9999]
)
def test_a_damaged_memo_is_as_good_as_none(tmp_path: Path, memo: Path, damage: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * MEMO_BYTES)
    memo.parent.mkdir(parents=True)
    memo.write_text(damage.replace("PATH", str(path)))
    assert identities(local(path)) == [sha256(b"x" * MEMO_BYTES)]
    assert list(json.loads(memo.read_text())) == [str(path)]


@pytest.mark.usefixtures("later")
def test_a_cache_that_cannot_be_written_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x" * MEMO_BYTES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    assert identities(local(tmp_path / "file")) == [sha256(b"x" * MEMO_BYTES)]


class _Store:
    """A store that tells `about` of its one file."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.opened = 0

    def info(self, name: str) -> dict[str, Any]:
        return self.about

    def open(self, name: str, mode: str) -> Any:
        import io

        self.opened += 1
        return io.BytesIO(b"content")


MD5 = hashlib.md5(b"content").digest()


@pytest.mark.parametrize(
    ("about", "wanted"),
    [
        ({"size": 7, "md5Hash": base64.b64encode(MD5).decode(), "etag": "CJ=="}, f"md5:{MD5.hex()}:7"),
        ({"size": 7, "crc32c": "AAAAAA==", "generation": "12"}, "crc32c:AAAAAA==:7:12"),
        ({"size": 7, "ETag": '"abc-2"'}, "etag:abc-2:7"),
        ({"size": 7, "ETag": 'W/"abc"'}, sha256(b"content")),
        ({"size": None, "ETag": '"abc"'}, sha256(b"content")),
        ({"size": 7}, sha256(b"content")),
    ],
)
def test_a_store_is_believed_if_it_tells_of_the_content(memo: Path, about: dict[str, Any], wanted: str) -> None:
    store = _Store(about)
    assert identities([File("bucket/a.jsonl", "jsonl", "", store)]) == [wanted]
    assert store.opened == (1 if wanted.startswith("sha256") else 0)


def test_a_file_that_is_gone_is_told(tmp_path: Path, memo: Path) -> None:
    with raises_error("E-DATA-028"):
        identities(local(tmp_path / "gone"))
