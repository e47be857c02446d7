from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.checkpoint.log import BrokenRecord, Claim, Commit, Log, _decoded, _encoded
from forerun.errors import UserError
from forerun.storage import folder
from forerun.storage.folder import LocalFolder


def commit_of(number: int, fence: int, step: int = 1) -> Commit:
    return Commit(number, fence, step, f"{step}-{fence}-1", {"a/b": (3, "00ff")}, {"loss": 0.1, "text": "ä"})


def test_records_come_back_as_they_were_appended(tmp_path: Path) -> None:
    log = Log(LocalFolder(tmp_path))
    assert log.records() == []
    claim = log.claim("me")
    assert claim == Claim(1, "me")
    assert log.commit(commit_of(2, 1))
    assert Log(LocalFolder(tmp_path)).records() == [claim, commit_of(2, 1)]
    assert log.owner() == claim


def test_a_number_is_taken_once(tmp_path: Path) -> None:
    first, second = Log(LocalFolder(tmp_path)), Log(LocalFolder(tmp_path))
    fence = first.claim("first").fence
    assert second.claim("second").fence == fence + 1
    assert not first.commit(commit_of(fence + 1, fence))
    assert second.commit(commit_of(fence + 2, fence + 1))
    assert [commit.fence for commit in first.commits()] == [fence + 1]


def test_of_many_that_claim_at_once_each_has_its_own_number(tmp_path: Path) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(Log(LocalFolder(tmp_path)).claim("one").fence)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 17))
    assert [path.suffix for path in (tmp_path / "commits").iterdir()] == [".json"] * 16


def test_without_hard_links_a_number_is_still_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(folder.os, "link", refused)
    log = Log(LocalFolder(tmp_path))
    assert log.claim("me").fence == 1
    assert log.commit(commit_of(2, 1))
    assert not log.commit(commit_of(2, 1, step=5))
    assert log.records() == [Claim(1, "me"), commit_of(2, 1)]
    assert len(list((tmp_path / "commits").iterdir())) == 2


BODY = {"format": 1, "number": 2, "kind": "commit", "fence": 1, "step": 7, "folder": "7-1-1", "token": "0f"}
CONTENT = _encoded({**BODY, "files": {"a": [1, "ff"], "b/c": [20, "e0"]}, "record": {"loss": 1.5, "nan": float("nan")}})


@given(st.integers(0, len(CONTENT) * 8 - 1))
def test_any_flipped_bit_of_a_record_shows(bit: int) -> None:
    changed = bytearray(CONTENT)
    changed[bit // 8] ^= 1 << bit % 8
    assert isinstance(_decoded(2, bytes(changed)), BrokenRecord)


@given(st.integers(0, len(CONTENT) - 1))
def test_any_part_of_a_record_is_no_record(length: int) -> None:
    assert isinstance(_decoded(2, CONTENT[:length]), BrokenRecord)
    assert isinstance(_decoded(2, CONTENT[:length] + bytes(len(CONTENT) - length)), BrokenRecord)


def test_the_whole_record_is_one_and_only_under_its_number() -> None:
    assert isinstance(_decoded(2, CONTENT), Commit)
    assert isinstance(_decoded(3, CONTENT), BrokenRecord)
    newer = _decoded(2, _encoded({**BODY, "format": 2}))
    assert isinstance(newer, BrokenRecord)
    assert "format 2" in newer.why
    assert not newer.damaged, "it must not be buried"


def test_only_damaged_records_are_buried(tmp_path: Path) -> None:
    """A record of a newer forerun, and one that cannot be read now, may be whole: they stay as they are."""
    log = Log(LocalFolder(tmp_path))
    log.claim("me")
    commits = tmp_path / "commits"
    newer = _encoded({**BODY, "format": 2, "number": 2})
    (commits / "000000000002.json").write_bytes(newer)
    (commits / "000000000003.json").write_bytes(b"damaged")
    (commits / "000000000004.json").mkdir()
    (commits / "000000000004.json" / "inside").write_bytes(b"kept")
    log.replace_broken()
    assert (commits / "000000000002.json").read_bytes() == newer
    assert (commits / "000000000004.json" / "inside").read_bytes() == b"kept"
    assert [type(record) for record in log.records()] == [Claim, BrokenRecord, Claim, BrokenRecord]


class UnlistedBucket(LocalFolder):
    """A folder that acts as a bucket whose objects can be read and created, and not listed."""

    is_local = False

    def names(self, folder: str = "") -> list[str]:
        return []


def test_empty_listing_of_existing_records_is_an_error(tmp_path: Path) -> None:
    log = Log(UnlistedBucket(tmp_path))
    assert log.records() == []
    assert log.claim("me").fence == 1
    for call in (log.records, lambda: log.claim("me")):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.code == "E-CHECKPOINT-019"


def test_record_that_is_created_between_two_listings_is_read(tmp_path: Path) -> None:
    class Late(UnlistedBucket):
        calls = 0

        def names(self, folder: str = "") -> list[str]:
            self.calls += 1
            return [] if self.calls == 1 else LocalFolder.names(self, folder)

    Log(LocalFolder(tmp_path)).claim("another")
    assert [type(record) for record in Log(Late(tmp_path)).records()] == [Claim]
