"""The lock of a run: a second process is rejected while the first one lives, and only then."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from error_assertions import raises_error
from recording_reporter import RecordingReporter

from forerun.cli.main import main
from forerun.errors import UserError
from forerun.reporter import SILENT
from forerun.supervise import run_lock
from forerun.supervise.run_lock import acquire, holder_of, lock_file, owned

SOURCE = Path(__file__).resolve().parents[3] / "src"
HOLD = """
import sys
from pathlib import Path
from forerun.reporter import SILENT
from forerun.supervise.run_lock import owned
with owned(Path(sys.argv[1]), take_over="over" in sys.argv, reporter=SILENT):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(run: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the run until its stdin is closed."""
    command = [sys.executable, "-c", HOLD, str(run), *words]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def nothing(text: str) -> None:
    raise AssertionError(f"unexpected: {text}")


def test_a_live_process_is_named_and_a_killed_one_is_not_in_the_way(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    with other_process(run) as process:
        with pytest.raises(UserError) as refused:
            acquire(run, take_over=False, reporter=SILENT)
        assert refused.value.exit_code == 2
        assert f"process {process.pid} on {socket.gethostname()}, started" in refused.value.why
        assert "--take-over" in refused.value.fix
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert lock_file(run).exists()  # left by the kill, and held by no process
    with owned(run, take_over=False, reporter=SILENT):
        holder = holder_of(lock_file(run))
        assert holder is not None
        assert holder.pid == os.getpid()
    assert not lock_file(run).exists()


def test_another_run_of_the_same_folder_is_free(tmp_path: Path) -> None:
    with other_process(tmp_path / "one"), owned(tmp_path / "two", take_over=False, reporter=SILENT):
        pass


def test_a_run_that_was_taken_over_belongs_to_the_second(tmp_path: Path) -> None:
    run, told = tmp_path / "one", list[str]()
    with other_process(run) as first:
        mine = acquire(run, take_over=True, reporter=RecordingReporter(told))
        assert f"process {first.pid}" in told[0]
        with raises_error("E-HOSTS-023"):  # by this process now, not by the first
            acquire(run, take_over=False, reporter=SILENT)
        assert first.stdin is not None
        first.stdin.close()  # the end of the first does not free the run
        first.wait()
    with pytest.raises(UserError) as refused:
        acquire(run, take_over=False, reporter=SILENT)
    assert f"process {os.getpid()} " in refused.value.why
    mine.release()
    acquire(run, take_over=False, reporter=SILENT).release()


def test_a_folder_that_was_made_for_the_lock_alone_is_removed(tmp_path: Path) -> None:
    with owned(tmp_path / "runs" / "one", take_over=False, reporter=SILENT):
        assert (tmp_path / "runs").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_a_recent_beat_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    run, told = tmp_path / "one", list[str]()
    file = lock_file(run)
    file.write_text(json.dumps({"pid": 77, "host": "elsewhere", "started": time.time() - 7200}), "utf-8")
    with pytest.raises(UserError) as refused:
        acquire(run, take_over=False, reporter=SILENT)
    assert "77 on elsewhere" in refused.value.why
    os.utime(file, (0, time.time() - 2 * run_lock.LOST_SECONDS))
    acquire(run, take_over=False, reporter=RecordingReporter(told)).release()
    assert len(told) == 1


def test_a_place_that_cannot_hold_runs_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    with raises_error("E-HOSTS-022"):
        acquire(tmp_path / "file" / "one", take_over=False, reporter=SILENT)


@pytest.mark.parametrize("words", [(), ("--supervise",), ("--fresh",)])
def test_train_is_rejected_before_it_reads_anything(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data does not exist, so any command that reads it would fail with another error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("model: {layers: 1, embed: 8, heads: 1}\ndata: {path: absent.txt}\n", "utf-8")
    with other_process(tmp_path / "runs" / "one") as process:
        (tmp_path / "runs" / "one").mkdir()
        assert main(["train", "job.yaml", "name=one", *words]) == 2
        assert f"process {process.pid} on" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()] == ["one"]
        if words:
            return
        assert main(["train", "job.yaml", "name=one", "--take-over"]) == 2
        captured = capsys.readouterr().err
        assert f"process {process.pid} on" in captured.splitlines()[0]  # the warning
        assert "absent.txt" in captured
