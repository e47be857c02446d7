"""Does a job fit a slice? Asked of the real TPU compiler in a child process, answered in seconds.

The compiler's memory report is ready long before its code is: the child is ended as soon as the report
says that the program fits. A program that does not fit ends the compile by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import UserError
from forerun.plan.memory import MemoryReport, memory_report
from forerun.plan.question import Question
from forerun.plan.worker import ERROR, FACTS
from forerun.units import Bytes, Seconds

SCHEDULED = "*after_optimizations_after_buffer_assignment.txt"
POLL_SECONDS = 0.05
DUMP_FLAGS = "--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_step"


@dataclass(frozen=True)
class Verdict:
    question: Question
    memory: MemoryReport
    compile_seconds: Seconds
    program: str
    mesh: str

    @property
    def limit_bytes(self) -> Bytes:
        usable = self.question.slice.chip.usable_bytes
        assert usable is not None, "TPU chips all have it"
        return Bytes(usable)

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.limit_bytes

    @property
    def spare_bytes(self) -> Bytes:
        """Left over if positive, short if negative."""
        return Bytes(self.limit_bytes - self.memory.peak_bytes)


def require_compiler() -> None:
    from importlib.util import find_spec

    if find_spec("libtpu") is None:
        raise UserError(
            "the TPU compiler is not installed",
            why="plan compiles with the libtpu package that this jax release pins",
            fix="pip install 'forerun[plan]'",
        )


def verdict(question: Question, on_phase: Callable[[str], None] = lambda phase: None) -> Verdict:
    """Blocks until the compiler has decided. `on_phase` hears 'lower' and 'compile'."""
    require_compiler()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="forerun-plan-") as name:
        folder = Path(name)
        child = _start(question, folder)
        try:
            facts = _wait(child, folder, question, on_phase)
        finally:
            _end(child)
        memory = memory_report(folder, facts["arguments"])  # type: ignore[arg-type]
    seconds = Seconds(time.perf_counter() - started)
    return Verdict(question, memory, seconds, str(facts["program"]), str(facts["mesh"]))


def _start(question: Question, folder: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": DUMP_FLAGS.format(folder=folder),
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    with (folder / "stderr").open("wb") as noise:  # libtpu talks a lot; it is shown only when something breaks
        child = subprocess.Popen(
            [sys.executable, "-m", "forerun.plan.worker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=noise,
            stderr=noise,
            env=env,
            start_new_session=True,
        )
    assert child.stdin is not None
    child.stdin.write(question.to_json().encode())
    child.stdin.close()
    return child


def _wait(
    child: subprocess.Popen[bytes], folder: Path, question: Question, on_phase: Callable[[str], None]
) -> dict[str, object]:
    """Until the report is there and says 'fits', or the child has ended."""
    phase = ""
    while child.poll() is None:
        lowered = (folder / FACTS).exists()
        if phase != (phase := "compile" if lowered else "lower"):
            on_phase(phase)
        if lowered and any(folder.glob(SCHEDULED)):
            facts = _facts(folder)
            limit = question.slice.chip.usable_bytes
            if facts and memory_report(folder, facts["arguments"]).peak_bytes <= (limit or 0):  # type: ignore[arg-type]
                return facts
        time.sleep(POLL_SECONDS)
    return _after_end(child, folder, question)


def _facts(folder: Path) -> dict[str, object]:
    facts: dict[str, object] = json.loads((folder / FACTS).read_text())
    return facts


def _after_end(child: subprocess.Popen[bytes], folder: Path, question: Question) -> dict[str, object]:
    error = json.loads((folder / ERROR).read_text()) if (folder / ERROR).exists() else {}
    if "what" in error:
        raise UserError(error["what"], why=error["why"], fix=error["fix"])
    reported = any(folder.glob(SCHEDULED)) or any(folder.glob("*memory-usage-report.txt"))
    if reported and (child.returncode == 0 or "RESOURCE_EXHAUSTED" in error.get("compiler", "")):
        return _facts(folder)
    noise = (folder / "stderr").read_text(errors="replace").strip().splitlines()
    raise RuntimeError(
        f"the TPU compiler failed on {question.slice.name} (exit {child.returncode}): "
        + (error.get("compiler") or "\n".join(noise[-15:]))
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
