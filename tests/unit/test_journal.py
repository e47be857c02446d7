from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from recording_reporter import RecordingReporter

from forerun.journal import Journal, Seal, entry_of


def line(step: int) -> bytes:
    return json.dumps({"step": step, "loss": step / 7}).encode() + b"\n"


def written(path: Path, steps: range, seal_at: tuple[int, ...] = ()) -> list[Seal]:
    seals = []
    with Journal(path, last=0) as journal:
        for step in steps:
            journal.append(line(step))
            if step in seal_at:
                seals.append(journal.seal(step))
    return seals


def test_a_seal_is_the_length_and_the_sha256_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first, second = written(path, range(1, 6), (2, 5))
    content = path.read_bytes()
    start = line(1) + line(2)
    assert first == Seal(2, len(start), hashlib.sha256(start).hexdigest())
    assert second == Seal(5, len(content), hashlib.sha256(content).hexdigest())


def test_a_resumed_journal_has_the_bytes_of_its_seal_and_counts_on(tmp_path: Path) -> None:
    path, told = tmp_path / "a.jsonl", list[str]()
    seals = written(path, range(1, 8), (2, 4))
    with path.open("ab") as out:
        out.write(b"garbage after the checkpoint\n{")
    with Journal(path, last=4, seals=seals, reporter=RecordingReporter(told)) as journal:
        assert path.read_bytes() == b"".join(map(line, range(1, 5)))
        journal.append(line(5))
        again = journal.seal(5)
    assert again == Seal(5, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert told == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_of_the_checkpoints_own_step_that_it_does_not_have_is_removed(tmp_path: Path) -> None:
    """A validation of step 4 was logged after the checkpoint of step 4, and is done and logged again."""
    path, told = tmp_path / "a.jsonl", list[str]()
    seals = written(path, range(1, 5), (4,))
    before = path.read_bytes()
    with path.open("ab") as out:
        out.write(b'{"step": 4, "validation_loss": 1.5}\n')
    Journal(path, last=4, seals=seals, reporter=RecordingReporter(told)).close()
    assert (path.read_bytes(), told) == (before, [])


@pytest.mark.parametrize(("changed", "lines"), [(2, "lines 1 to 6 (steps 1 to 6)"), (5, "lines 4 to 6 (steps 4 to 6)")])
def test_a_changed_line_is_reported_with_the_steps_since_the_last_checkpoint_that_fits(
    tmp_path: Path, changed: int, lines: str
) -> None:
    path, told = tmp_path / "a.jsonl", list[str]()
    seals = written(path, range(1, 8), (3, 6))
    content = path.read_bytes().replace(line(changed), line(changed).replace(b"0.", b"9."))
    path.write_bytes(content)
    with Journal(path, last=6, seals=seals, reporter=RecordingReporter(told)) as journal:
        new = journal.seal(6)
    [text] = told
    assert str(path) in text
    assert lines in text
    assert path.read_bytes() == content[: -len(line(7))], "what can be read stays"
    Journal(path, last=6, seals=[*seals, new], reporter=RecordingReporter(told)).close()
    assert len(told) == 1, "the next checkpoint has the file as it is now"


BROKEN = [b"not json", b"[1]", b'{"loss": 1}', b'{"step": "x"}', b'{"step": true}', b"", bytes(9), b'{"step": 2}\xff']


@pytest.mark.parametrize("broken", [*BROKEN, b"[" * 100_000])
def test_a_broken_line_is_kept_aside(tmp_path: Path, broken: bytes) -> None:
    path, told = tmp_path / "a.jsonl", list[str]()
    path.write_bytes(line(1) + broken + b"\n" + line(2) + line(3))
    Journal(path, last=2, reporter=RecordingReporter(told)).close()
    assert path.read_bytes() == line(1) + line(2)
    assert (tmp_path / "a.jsonl.damaged").read_bytes() == broken + b"\n"
    [text] = told
    assert "line 2" in text
    assert entry_of(broken) is None


@pytest.mark.parametrize("content", [None, b"", line(1), line(1) + line(2)[:9]])
def test_lost_lines_are_reported(tmp_path: Path, content: bytes | None) -> None:
    path, told = tmp_path / "a.jsonl", list[str]()
    seals = written(path, range(1, 5), (1, 4))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    Journal(path, last=4, seals=seals, reporter=RecordingReporter(told)).close()
    assert path.read_bytes() == (line(1) if content else b"")
    [text] = told
    assert "step 4" in text or "to 4" in text


def test_a_new_run_starts_an_empty_journal_and_reports_nothing(tmp_path: Path) -> None:
    path, told = tmp_path / "a.jsonl", list[str]()
    path.write_bytes(line(1) + b"garbage\n")
    Journal(path, last=0, reporter=RecordingReporter(told)).close()
    assert (path.read_bytes(), told) == (b"", [])
    assert list(tmp_path.iterdir()) == [path]


def test_a_former_owner_does_not_write_into_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path, last=0) as former:
        former.append(line(1))
        seal = former.seal(1)
        with Journal(path, last=1, seals=[seal]) as journal:
            former.append(line(2))
            journal.append(line(2))
            former.append(line(3))
    assert path.read_bytes() == line(1) + line(2)
