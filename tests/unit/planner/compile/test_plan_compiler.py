"""The compiler's process by a stand-in: a script that does in its folder what the real one may do, good or bad."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from error_assertions import raises_error

from forerun.config.schema import Job
from forerun.errors import StorageError, UserError
from forerun.hardware.slices import slice_named
from forerun.installation import install_command
from forerun.planner.compile import compiler, installed_compilers
from forerun.planner.compile.compiler import CompilerFailure, Stopped
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB

Usage = namedtuple("Usage", "total used free")
FACTS: dict[str, Any] = {
    "arguments": ["weights"],
    "program": "0123456789ab",
    "mesh": "1x8x1",
    "weights": [[8, 128]],
    "saved_bytes": 4096,
    "layers": 0,
    "flops_per_step": 1e12,
    "tokens_per_step": 4096,
}
PROGRAM = "HloModule m\nENTRY %main (p: f32[8,128]) -> f32[8,128] {\n  ROOT %p = f32[8,128] parameter(0)\n}\n"
STAND_IN = """#!{python} -S
import json, os, sys
folder = sys.argv[1]
print("E0000 00:00:1 common_lib.cc:554] noise of the library", file=sys.stderr, flush=True)
def put(name, text, mode="w"):
    with open(os.path.join(folder, name + ".new"), mode) as file:
        file.write(text)
    os.rename(os.path.join(folder, name + ".new"), os.path.join(folder, name))
def facts():
    put("facts.json", json.dumps({facts}))
def report(total, argument=100):
    put("m.after_optimizations_before_buffer_assignment.txt", {program!r})
    put("m.after_optimizations.txt", {program!r})
    put("m.after_optimizations-buffer-assignment.txt", f"allocation 0: size {{argument}}, parameter 0, shape:\\n")
    put("m.after_optimizations-live-range.txt", "HloLiveRange (max 1):\\n")
    put("m.after_optimizations-memory-usage-report.txt",
        f"Memory Space: default (color=0)\\nTotal bytes: {{total}} (x)\\n\\n")
def taken():
    put("m.after_optimizations_after_buffer_assignment.txt", {program!r})
def error(**content):
    put("error.json", json.dumps(content))
def hang():
    sys.stdin.read()
{body}
"""


class StandInWorker(subprocess.Popen[bytes]):
    """A script that runs as a worker."""

    def __init__(self, script: Path, asked: CompileRequest, folder: Path) -> None:
        env = {**os.environ, **compiler._environment(asked, folder)}
        with (folder / compiler.NOISE).open("wb") as noise:
            super().__init__(
                [script, folder], stdin=subprocess.PIPE, stdout=noise, stderr=noise, env=env, start_new_session=True
            )

    def end(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        assert self.stdin is not None
        self.stdin.close()


def question(model: str = "qwen3-0.6b") -> CompileRequest:
    job = Job.model_validate({"model": model, "data": "nothing", "steps": 1})
    return CompileRequest(ResolvedJob(job), slice_named("v5e-8"))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with what the compiler does; temp folders are made in tmp_path / "temp"."""
    python = sys.executable
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    monkeypatch.setattr(installed_compilers, "find_spec", lambda name: name)

    def write(body: str) -> Path:
        script = tmp_path / "compiler"
        script.write_text(STAND_IN.format(python=python, body=body, facts=FACTS, program=PROGRAM))
        script.chmod(0o755)
        monkeypatch.setattr(compiler, "_start", lambda server, *request: StandInWorker(script, *request))
        return tmp_path / "temp"

    return write


def ask(asked: CompileRequest | None = None, phases: list[str] | None = None) -> FitResult:
    return compiler.ask(asked or question(), threading.Event(), (phases if phases is not None else []).append)


def test_a_program_that_fits_is_not_waited_for(stand_in: Any) -> None:
    temp = stand_in("facts(); report(5000); hang()")
    phases: list[str] = []
    answer = ask(phases=phases)
    assert (answer.fits, answer.memory.peak_bytes, answer.memory.weights_bytes) == (True, 5000, 100)
    assert (answer.program, answer.mesh) == ("0123456789ab", "1x8x1")
    assert phases[-1] == "compile"
    assert list(temp.iterdir()) == []


def test_reports_are_read_only_when_whole(tmp_path: Path) -> None:
    """The compiler writes the program, its buffers and the report, twice for some chips."""
    names = ("", "-buffer-assignment", "-live-range", "-memory-usage-report")
    program, assignment, live_ranges, report = (tmp_path / f"m.after_optimizations{name}.txt" for name in names)

    def put(path: Path, text: str, at: int) -> FitResult | None:
        path.write_text(text)
        os.utime(path, ns=(at, at))
        return compiler._accepted(tmp_path, FACTS, question(), os.getpid())

    whole = "Memory Space: default (color=0)\nTotal bytes: {} (x)\n\n"
    buffers = "allocation 0: size 100, parameter 0, shape:\n"
    assert put(program, PROGRAM, at=1) is None
    assert put(assignment, buffers, at=2) is None
    assert put(report, whole.format(5000), at=4) is None, "no live ranges"
    first = put(live_ranges, "HloLiveRange (max 1):\n", at=3)
    assert first is not None
    assert first.memory.peak_bytes == 5000
    assert put(program, PROGRAM[:-4], at=5) is None, "a second round has begun: the program has no end"
    assert put(program, PROGRAM, at=time.time_ns() + 10**12) is None, "written this moment, however long it takes here"
    assert put(program, PROGRAM, at=5) is not None
    assert put(report, whole.format(7000)[:-20], at=6) is None, "cut off"
    assert put(assignment, "", at=5) is None
    assert put(assignment, buffers, at=5) is None
    assert put(report, whole.format(7000), at=6) is not None
    with live_ranges.open("a"):
        assert compiler._accepted(tmp_path, FACTS, question(), os.getpid()) is None, "not closed yet"
    assert compiler._accepted(tmp_path, FACTS, question(), os.getpid()) is not None


LEFT_ALONE = """
import sys, threading
from pathlib import Path
from forerun.planner.compile import worker

folder = Path(sys.argv[1])
threading.Thread(target=worker._end_with_command, args=(folder,), daemon=True).start()
print("ready", flush=True)
number = 0
while True:
    number += 1
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / f"dump-{number % 50}").write_text("of the compiler")
    except FileNotFoundError:
        pass
"""


@pytest.mark.timing
def test_a_compiler_that_writes_to_the_last_leaves_no_folder(tmp_path: Path) -> None:
    """It makes its folder anew where there is none, as XLA does."""
    command = [sys.executable, "-c", LEFT_ALONE, str(tmp_path / "dump")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.stdin.close()
        child.wait(timeout=300)
    assert list(tmp_path.iterdir()) == []


def test_near_the_limit_the_compiler_itself_decides(stand_in: Any) -> None:
    near = int(15.75 * GIB) - 1024
    stand_in(
        f"facts(); report({near}); error(compiler='RESOURCE_EXHAUSTED: Ran out of memory on HBM ...'); sys.exit(1)"
    )
    assert not ask().fits
    stand_in(f"facts(); report({near}); taken(); hang()")
    assert ask().fits


def test_too_large(stand_in: Any) -> None:
    stand_in(
        f"facts(); report({20 * GIB}); error(compiler='RESOURCE_EXHAUSTED: Ran out of memory on HBM ...'); sys.exit(1)"
    )
    answer = ask()
    assert not answer.fits
    assert answer.memory.peak_bytes == 20 * GIB


def test_memory_that_is_not_hbm_is_a_failure(stand_in: Any) -> None:
    """The error comes first here: a report that fits is an answer, should the compiler stand still behind it."""
    stand_in("facts(); error(compiler='RESOURCE_EXHAUSTED: Ran out of memory in vmem ...'); report(99); sys.exit(1)")
    with pytest.raises(CompilerFailure, match=r"the TPU compiler failed on v5e-8: RESOURCE_EXHAUSTED: .* vmem"):
        ask()


def test_error_of_a_model_of_ones_own(stand_in: Any) -> None:
    stand_in("error(failure='TypeError: no', where='/job/net.py, line 7'); sys.exit(1)")
    with raises_error("E-PLAN-007", "v5e-8", "'net:Net'") as raised:
        ask(question("net:Net"))
    assert raised.value.why == "TypeError: no\n/job/net.py, line 7"
    with pytest.raises(CompilerFailure, match="could not be built on v5e-8: TypeError: no"):
        ask()


def test_mistake_found_in_the_child_names_the_slice(stand_in: Any) -> None:
    stand_in("error(code='E-PROGRAM-001', what='odd heads', why='w', fix='f'); sys.exit(2)")
    with pytest.raises(UserError, match="v5e-8: odd heads"):
        ask()


def test_killed(stand_in: Any) -> None:
    temp = stand_in("os.kill(os.getpid(), 9)")
    with raises_error("E-PLAN-009", "v5e-8"):
        ask()
    assert list(temp.iterdir()) == []


def test_dead_without_a_result(stand_in: Any) -> None:
    stand_in("print('libtpu.so: cannot open', file=sys.stderr); sys.exit(3)")
    with pytest.raises(CompilerFailure, match=r"ended on v5e-8 without a result \(exit code 3\)") as raised:
        ask()
    assert str(raised.value).endswith("libtpu.so: cannot open")


def test_aborted(stand_in: Any) -> None:
    stand_in("os.abort()")
    with pytest.raises(CompilerFailure, match="SIGABRT"):
        ask()


def test_no_report_after_a_good_end(stand_in: Any) -> None:
    stand_in("facts()")
    with pytest.raises(CompilerFailure, match="wrote no readable memory report"):
        ask()


def test_stop_ends_the_child_and_its_folder(stand_in: Any) -> None:
    temp = stand_in("facts(); hang()")
    stop = threading.Event()
    child: list[Path] = []

    def heard(phase: str) -> None:
        if phase == "compile":
            child.extend(temp.iterdir())
            stop.set()

    with pytest.raises(Stopped):
        compiler.ask(question(), stop, heard)
    assert len(child) == 1
    assert list(temp.iterdir()) == []


def test_no_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_compilers, "find_spec", lambda name: None)
    with raises_error("E-PLAN-004") as raised:
        ask()
    assert raised.value.fix == install_command("plan")


def test_full_disk(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("hang()")
    free = iter([10 * GIB, 4096])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10 * GIB, 0, next(free)))
    with pytest.raises(StorageError, match=r"the disk is full: 4.00 KiB left") as raised:
        ask()
    assert "TMPDIR" in raised.value.fix


def test_the_users_flags_stay(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_user=1")
    stand_in("error(code='E-PROGRAM-001', what=os.environ['XLA_FLAGS'], why='w', fix='f'); sys.exit(2)")
    with pytest.raises(UserError) as raised:
        ask()
    assert "--xla_of_the_user=1 --xla_dump_to=" in raised.value.what
