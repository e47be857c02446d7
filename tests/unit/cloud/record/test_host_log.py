"""The parts of a log: each once, in their order, across gaps and failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.cloud.record.host_log import PARTS_AT_ONCE, READS_PER_LISTING, LogReader
from forerun.cloud.record.run_files import RunFiles


def test_new_parts_are_read_once_and_in_order(tmp_path: Path) -> None:
    files = RunFiles(str(tmp_path))
    reader = LogReader(files, 1, 0)
    assert reader.read() == b""
    expected = b""
    for part in range(3 * PARTS_AT_ONCE):
        content = f"line {part}\n".encode()
        files.add_log(1, 0, part, content)
        files.add_log(1, 1, part, b"host 1\n")
        files.add_log(2, 0, part, b"attempt 2\n")
        expected += content
        if part in (0, 1, 5, 40):
            assert reader.read() == expected
            expected = b""
    assert reader.read() == expected
    assert reader.read() == b""


def test_many_parts_between_two_reads(tmp_path: Path) -> None:
    files, count = RunFiles(str(tmp_path)), 2 * PARTS_AT_ONCE
    files.add_log(1, 0, 0, b"first\n")
    reader = LogReader(files, 1, 0)
    assert reader.read() == b"first\n"
    for part in range(1, count + 1):
        files.add_log(1, 0, part, b"%d\n" % part)
    assert reader.read() == b"".join(b"%d\n" % part for part in range(1, count + 1))


def test_a_gap_is_found_by_the_next_listing(tmp_path: Path) -> None:
    files = RunFiles(str(tmp_path))
    files.add_log(1, 0, 0, b"a")
    reader = LogReader(files, 1, 0)
    assert reader.read() == b"a"
    files.add_log(1, 0, 2, b"c")
    assert b"".join(reader.read() for _ in range(READS_PER_LISTING + 1)) == b"c"


def test_a_failed_read_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(str(tmp_path))
    files.add_log(1, 0, 0, b"a")
    reader = LogReader(files, 1, 0)
    kind = type(files.files)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "read_many", lambda *_: (_ for _ in ()).throw(OSError("no network")))
        with pytest.raises(OSError, match="no network"):
            reader.read()
    assert reader.read() == b"a"
    files.add_log(1, 0, 1, b"b")
    with monkeypatch.context() as patch:
        patch.setattr(kind, "read_many", lambda *_: (_ for _ in ()).throw(OSError("no network")))
        with pytest.raises(OSError, match="no network"):
            reader.read()
    assert reader.read() == b"b"
