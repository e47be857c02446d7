"""Ctrl-C in real processes without jax. The phase at the signal is certain: the process says when it is ready."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.timing

SOURCE = Path(__file__).resolve().parents[2] / "src"
INTERRUPTED = 130
PATIENCE_SECONDS = 60
BEGIN = """
import hashlib, os, sys, threading, time
from pathlib import Path
from forerun import interrupt
interrupt.install()
def ready():
    os.write(1, b"ready\\n")  # past the buffer of stdout
def native():  # takes an hour, releases the GIL, and no signal handler of Python runs meanwhile
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
def busy():
    ready()
    native()
"""


@contextmanager
def children_with_ctrl_c() -> Iterator[None]:
    """Start children that react to SIGINT: it is ignored if the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program that reacts to SIGINT, in a process group of its own, and wait until it says that it is ready."""
    with children_with_ctrl_c():
        child = subprocess.Popen(
            [sys.executable, "-c", BEGIN + program, *arguments],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        child.kill()
        pytest.fail(child.communicate()[1])
    return child


def interrupted(program: str, *arguments: str, presses: int = 1) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a program after Ctrl-C."""
    with started(program, *arguments) as child:
        try:
            for _ in range(presses):
                os.killpg(child.pid, signal.SIGINT)
            out, err = child.communicate(timeout=PATIENCE_SECONDS)
        finally:
            child.kill()
    return child.returncode, out, err


def test_native_code_does_not_delay_the_end() -> None:
    code, _, err = interrupted("busy()")
    assert code == INTERRUPTED
    assert err == "\nstopped by Ctrl-C\n"


def test_cleanups_and_the_report_run_at_the_end(tmp_path: Path) -> None:
    program = """
file = Path(sys.argv[1])
file.write_text("temporary")
interrupt.set_report(lambda: "step 7 is saved")
with interrupt.cleanup(file.unlink), interrupt.cleanup(lambda: 1 / 0):
    print("printed", end="")
    busy()
"""
    code, out, err = interrupted(program, str(tmp_path / "file"))
    assert (code, out) == (INTERRUPTED, "printed")
    assert "7 is saved" in err
    assert "Traceback" not in err
    assert not (tmp_path / "file").exists()


def test_a_cleanup_that_hangs_does_not_prevent_the_end() -> None:
    code, _, _ = interrupted("with interrupt.cleanup(lambda: time.sleep(3600)):\n    busy()")
    assert code == INTERRUPTED


def test_a_phase_that_cooperates_ends_on_its_own() -> None:
    program = """
stop = threading.Event()
with interrupt.cooperating(lambda seconds: stop.set()):
    ready()
    stop.wait()
    assert interrupt.pressed()
print("saved")
interrupt.finish(0)
"""
    assert interrupted(program) == (INTERRUPTED, "saved\n", "\nstopped by Ctrl-C\n")


def test_a_phase_that_takes_too_long_is_ended() -> None:
    code, _, err = interrupted("interrupt.set_report(lambda: 'step 3')\nwith interrupt.cooperating():\n    busy()")
    assert code == INTERRUPTED
    assert err == "\nstopped by Ctrl-C: step 3\n"


def test_the_second_press_does_not_wait_for_a_phase() -> None:
    program = """
interrupt.LIMIT_SECONDS = interrupt.END_SECONDS = 3600
with interrupt.cooperating(lambda seconds: print("stopping", flush=True)):
    busy()
"""
    with started(program) as child:
        os.killpg(child.pid, signal.SIGINT)
        assert child.stdout is not None
        assert child.stdout.readline() == "stopping\n"
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait(PATIENCE_SECONDS) == INTERRUPTED


def test_a_phase_can_continue_after_ctrl_c() -> None:
    program = """
interrupt.LIMIT_SECONDS = 0.3
with interrupt.raising():
    try:
        ready()
        time.sleep(3600)
    except KeyboardInterrupt:
        interrupt.handled()
time.sleep(1)  # longer than the limit, which no longer applies
interrupt.finish(5)
"""
    assert interrupted(program)[0] == 5


def test_a_child_that_is_starting_prints_no_traceback(tmp_path: Path) -> None:
    program = """
import subprocess
with interrupt.children_without_ctrl_c():
    said = open(sys.argv[1], "w")
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1, stderr=said)
child.stdout.readline()
print(child.pid, flush=True, file=said)
busy()
"""
    code, _, _ = interrupted(program, str(tmp_path / "said"))
    assert code == INTERRUPTED
    pid = (tmp_path / "said").read_text("utf-8").split()[0]
    while os.path.exists(f"/proc/{pid}"):  # its stdin is closed: it ends with EOFError, and without the signal
        time.sleep(0.01)
    assert "KeyboardInterrupt" not in (tmp_path / "said").read_text("utf-8")


def test_sigterm_and_ctrl_c_share_the_wakeup_descriptor() -> None:
    program = """
from forerun.supervise.worker import alone
worker = alone(grace_seconds=3000)
assert worker.stop.go()
with worker.saving_at_ctrl_c():
    ready()
    while worker.stop.go():
        time.sleep(0.01)
print(worker.stop.save, 0 < worker.stop.remaining_seconds() < 2)
interrupt.finish(0)
"""
    code, out, err = interrupted(program)
    assert (code, out) == (INTERRUPTED, "True True\n")
    assert "saving after this step" in err
    with started(program) as child:
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=PATIENCE_SECONDS)
    assert (child.returncode, out) == (0, "True False\n")


def test_ctrl_c_before_the_first_step_does_not_wait() -> None:
    program = """
from forerun.supervise.worker import alone
with alone().saving_at_ctrl_c():
    busy()
"""
    assert interrupted(program)[0] == INTERRUPTED


def test_the_terminal_gets_its_cursor_back() -> None:
    program = """
from rich.text import Text
from forerun.console import SafeConsole, SafeLive
live = SafeLive(Text("working"), console=SafeConsole(force_terminal=True))
live.start()
print("ready", file=sys.__stdout__, flush=True)
native()
"""
    reader, terminal = pty.openpty()
    with children_with_ctrl_c():
        child = subprocess.Popen(
            [sys.executable, "-c", BEGIN + program],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm"},
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
    os.close(terminal)
    shown = b""
    while b"ready" not in shown:
        shown += os.read(reader, 1024)
    os.kill(child.pid, signal.SIGINT)
    with suppress(OSError):  # EIO: the other end is closed
        while more := os.read(reader, 1024):
            shown += more
    assert child.wait(PATIENCE_SECONDS) == INTERRUPTED
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


@pytest.mark.parametrize("module", ["forerun.cli.commands", "forerun.cli.jobs"])
def test_ctrl_c_ends_the_command_while_it_imports(module: str, tmp_path: Path) -> None:
    """A job file that is a pipe without a writer would be waited for; a folder of modules says when imports begin."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT, "utf-8")
    with children_with_ctrl_c():
        child = subprocess.Popen(
            [sys.executable, "-m", "forerun", "check", "job.yaml"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(SOURCE))), "SLOW": module},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "importing\n"
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=PATIENCE_SECONDS)
    assert child.returncode == INTERRUPTED
    assert "Traceback" not in err


# Stops at the first import after the entry point: of the command line itself, or of its first command.
SLOW_IMPORT = """
import os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["SLOW"]:
            print("importing", flush=True)
            time.sleep(3600)
sys.meta_path.insert(0, Slow())
"""
