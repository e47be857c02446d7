"""The TPU compiler in a child process: started, watched, and ended as soon as it has decided on memory.

The compiler writes the scheduled program, its buffers and its memory report, one after the other or all at once, and
only then generates code, which takes nearly all of the time. So they are copied as soon as it has closed them all and
none has changed for a moment (tpu7x writes them twice, with the same buffers). A program that is too large for HBM ends
the compile with an error, and the report is complete then, too. One that comes very near the limit waits for the
compiler's own word.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.errors import StorageError, UserError
from forerun.installation import install_command
from forerun.memory_limit import address_space_bytes, require_address_space
from forerun.models.plugin import job_folder
from forerun.models.sizes import is_plugin
from forerun.plan.hlo import parse
from forerun.plan.ledger import PADDING, ModelShapes, ledger
from forerun.plan.memory import (
    ASSIGNMENT,
    REPORT,
    MemoryReport,
    Unreadable,
    argument_padding,
    memory_report,
    newest,
    newest_file,
)
from forerun.plan.question import Question
from forerun.plan.step_time import StepTime, step_time
from forerun.plan.worker import ERROR, FACTS
from forerun.units import KIB, MIB, Bytes

SCHEDULED = "*after_optimizations.txt"
UNSCHEDULED = "*after_optimizations_before_buffer_assignment.txt"  # of a program that does not fit
TAKEN = "*after_optimizations_after_buffer_assignment.txt"  # comes once the program has been found to fit
SETTLED = "settled"  # the folder of the copies
LIVE_RANGES = "*-live-range.txt"
NOISE = "stderr"
POLL_SECONDS = 0.05
QUIET_SECONDS = 0.5  # since the last write: they are written within milliseconds
ADDRESS_SPACE_BYTES = 2_500_000 * KIB  # libtpu aborts with 2,000,000 KiB; the smallest job compiles with 3,000,000
DISK_BYTES = 64 * MIB  # ten times the dump of llama3.1-8b on 1,024 chips
LIMIT_ROUNDING_BYTES = 6 * MIB  # the compiler tells its limits to 0.01 GiB: nearer than that, it is waited for
SHOWN_LINES, SHOWN_COLUMNS = 12, 300
DUMP_FLAGS = "--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_step"

Phase = Callable[[str], None]


class Stopped(Exception):
    """Somebody else has failed or pressed Ctrl-C: no answer is wanted any more."""


class CompilerFailure(RuntimeError):
    """The compiler, or what we gave it, is at fault: nothing that the user could mend in the job."""


@dataclass(frozen=True)
class Answer:
    """`accepted` is the compiler's own word on whether the program fits HBM."""

    memory: MemoryReport
    accepted: bool
    program: str
    mesh: str
    flops_per_step: float
    tokens_per_step: int
    ledger: Mapping[str, Bytes] = field(default_factory=dict)  # adds up to the peak
    step: StepTime | None = None  # of an accepted program
    saved_bytes: int | None = None  # of a checkpoint


def require_compiler() -> None:
    from importlib.util import find_spec

    if find_spec("libtpu") is None:
        raise UserError(
            "the TPU compiler is not installed",
            why="plan compiles with the libtpu package that this jax release pins",
            fix=install_command("plan"),
        )


def ask(question: Question, stop: threading.Event, on_phase: Phase) -> Answer:
    """Blocks until the compiler has decided, or `stop` is set. `on_phase` hears 'lower' and 'compile'."""
    require_compiler()
    require_address_space(ADDRESS_SPACE_BYTES, "the TPU compiler")
    require_disk(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="forerun-plan-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        child = _start(question, folder)
        try:
            answer = _watch(child, folder, question, stop, on_phase)
        finally:
            _end(child)
        return _examined(answer, folder, question)


def _examined(answer: Answer, folder: Path, question: Question) -> Answer:
    """With the ledger of its memory, and its time if it fits. Text to read: the compiler is gone by now."""
    facts, memory = _read(folder / FACTS), answer.memory
    files = folder / SETTLED if answer.accepted else folder
    module, assignment = parse(newest(files, SCHEDULED if answer.accepted else UNSCHEDULED)), newest(files, ASSIGNMENT)
    arguments = {
        "weights": memory.weights_bytes,
        "optimizer": memory.optimizer_bytes,
        "batch": memory.batch_bytes,
    }
    padding = argument_padding(assignment, facts["arguments"])
    arguments = {group: Bytes(size - padding.get(group, 0)) for group, size in arguments.items()}
    parts = ledger(
        assignment,
        newest(files, LIVE_RANGES),
        module,
        {**arguments, PADDING: sum(padding.values())},
        memory.peak_bytes,
        ModelShapes.of(facts["layers"], facts["weights"]),
    )
    if not answer.accepted:
        return replace(answer, ledger=parts)
    flops, own_model = answer.flops_per_step / question.devices, is_plugin(question.job.model)
    return replace(answer, ledger=parts, step=step_time(module, question.slice.chip, flops, own_model))


def require_disk(folder: Path, at_least_bytes: int = DISK_BYTES) -> None:
    free = shutil.disk_usage(folder).free
    if free < at_least_bytes:
        raise StorageError(
            f"the disk is full: {Bytes(free)} left in {folder}",
            why=f"the compiler writes its memory report there, and needs {Bytes(DISK_BYTES)} for each slice",
            fix="free some space, or point TMPDIR at another disk",
        )


def _start(question: Question, folder: Path) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {DUMP_FLAGS.format(folder=folder)}".strip(),
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    plugins = job_folder()
    with (folder / NOISE).open("wb") as noise:  # libtpu talks a lot; it is shown only when something breaks
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "forerun.plan.worker", str(folder), *([str(plugins)] if plugins else [])],
            stdin=subprocess.PIPE,
            stdout=noise,
            stderr=noise,
            env=env,
            bufsize=0,
            start_new_session=True,
        )
    assert child.stdin is not None
    try:
        child.stdin.write(question.to_json().encode() + b"\n")  # left open: the child ends when it closes
    except BrokenPipeError:
        child.wait()  # it is dead already; the watch finds out why
    return child


def _watch(
    child: subprocess.Popen[bytes], folder: Path, question: Question, stop: threading.Event, on_phase: Phase
) -> Answer:
    phase = ""
    while True:
        ended = child.poll() is not None  # asked first: what it has left behind is complete then
        if (folder / ERROR).exists():
            return _refused(folder, question)
        facts = _read(folder / FACTS)
        if phase != (phase := "compile" if facts else "lower"):
            on_phase(phase)
        if facts and (answer := _accepted(folder, facts, child.pid, quiet_seconds=0 if ended else QUIET_SECONDS)):
            limit = question.slice.chip.usable_bytes or 0
            clear = answer.memory.peak_bytes <= limit - LIMIT_ROUNDING_BYTES
            if clear or ended or any(folder.glob(TAKEN)):
                return answer
        if ended:
            raise _died(child.returncode, folder, question)
        require_disk(folder, at_least_bytes=MIB)
        if stop.wait(POLL_SECONDS):
            raise Stopped


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return content


def _answer(folder: Path, facts: dict[str, Any], accepted: bool) -> Answer:
    memory = memory_report(folder, facts["arguments"])
    work = facts["flops_per_step"], facts["tokens_per_step"]
    return Answer(memory, accepted, facts["program"], facts["mesh"], *work, saved_bytes=facts["saved_bytes"])


def _accepted(folder: Path, facts: dict[str, Any], pid: int, quiet_seconds: float = QUIET_SECONDS) -> Answer | None:
    """None if the compiler, process `pid`, has not come so far, or is writing at this moment."""
    try:
        return _answer(_settled(folder, pid, quiet_seconds), facts, accepted=True)
    except (Unreadable, FileNotFoundError):
        return None


def _settled(folder: Path, pid: int, quiet_seconds: float) -> Path:
    """Copies of the program and its reports, which belong together."""
    copies = folder / SETTLED
    copies.mkdir(exist_ok=True)
    patterns = (SCHEDULED, ASSIGNMENT, LIVE_RANGES, REPORT)
    before = [newest_file(folder, pattern) for pattern in patterns]
    written = [path.stat().st_mtime_ns for path in before]
    if time.time_ns() - max(written) < quiet_seconds * 1e9:
        raise Unreadable("the compiler may still be writing")
    if not _open_files(pid).isdisjoint(map(os.path.realpath, before)):
        raise Unreadable("the compiler has not closed them: a full disk or a busy machine holds it up")
    for path in before:
        shutil.copy(path, copies / path.name)
    if [path.stat().st_mtime_ns for path in before] != written:
        raise Unreadable("the compiler is writing")
    text = newest(copies, SCHEDULED)
    if "\nENTRY " not in text or not text.rstrip().endswith("\n}"):
        raise Unreadable("the scheduled program has no end")
    return copies


def _open_files(pid: int) -> set[str]:
    """Of a process; none of one that has ended."""
    found: set[str] = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def _refused(folder: Path, question: Question) -> Answer:
    """The compile has ended with an error: too little HBM is an answer, anything else is raised."""
    error, facts, name = _read(folder / ERROR), _read(folder / FACTS), question.slice.name
    if "what" in error:
        raise UserError(f"{name}: {error['what']}", why=error["why"], fix=error["fix"])
    text = error.get("compiler", "")
    if "RESOURCE_EXHAUSTED" in text and "hbm" in text.lower():
        try:
            return _answer(folder, facts, accepted=False)
        except Unreadable as unreadable:
            raise CompilerFailure(f"{name}: {_short(text)}\n{unreadable}") from unreadable
    model = question.job.model
    said = _short(text) if text else f"{_short(error['failure'])}\n{error['where']}"
    if is_plugin(model):
        raise UserError(
            f"{name}: model {model.name!r} does not {'compile' if text else 'run'}",
            why=said,
            fix="mend the model; its contract stands in forerun.models.base.Model",
        )
    if question.job.objective is not None:
        raise UserError(
            f"{name}: objective {question.job.objective.name!r} does not {'compile' if text else 'run'}",
            why=said,
            fix="mend the objective, see docs/own.md; without it (objective=null) the job tells whether it is to blame",
        )
    raise CompilerFailure(
        f"{'the TPU compiler failed' if text else 'the program could not be built'} on {name}: {said}"
    )


def _died(code: int, folder: Path, question: Question) -> Exception:
    """The compiler is gone without a word of Python."""
    name = question.slice.name
    if code == -signal.SIGKILL:
        return UserError(
            f"{name}: the compiler was killed",
            why="that is what Linux does when memory runs out: a compile for many chips takes several GiB",
            fix="name fewer slices at a time after --on, or use a machine with more memory",
        )
    said = _short((folder / NOISE).read_text("utf-8", errors="replace"), last=True)
    if (limit_bytes := address_space_bytes()) is not None:
        limited = f"the address space is limited to {Bytes(limit_bytes)}, and large programs need more than that"
        return UserError(
            f"{name}: the compiler ended without an answer ({_how(code)})",
            why=f"{limited}\n{said}".rstrip(),
            fix="ulimit -v unlimited, then the same command",
        )
    if code == 0:
        said = f"it left no memory report that we can read\n{said}"
    return CompilerFailure(f"the TPU compiler ended on {name} without an answer ({_how(code)}): {said}".rstrip(": \n"))


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _short(text: str, last: bool = False) -> str:
    """At most a dozen lines, none of them endless."""
    lines = [line[:SHOWN_COLUMNS].rstrip() for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[-SHOWN_LINES:] if last else lines[:SHOWN_LINES])
