"""A compiler in a child process, which is killed as soon as the memory of the program is known.

A compiler dumps the scheduled program, its buffers and its memory report, and only then generates code. Generating
code takes nearly all of the time. So these files are copied early: as soon as their contents show that all are complete
(`forerun.planner.compile.dump`).

If a program is too large for a TPU, the compile ends with an error, and the report is complete then, too. If its peak
is very close to the limit, this module waits until the compiler accepts or rejects it. The GPU compiler never rejects a
program, so for GPUs the peak is compared with the memory that `train` reserves.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.errors import StorageError, UserError
from forerun.memory_limit import address_space_bytes, require_address_space
from forerun.models.plugin import job_folder
from forerun.planner.compile.dump import LIVE_RANGES, SCHEDULED, SETTLED, TAKEN, UNSCHEDULED, copy_dump
from forerun.planner.compile.fit_result import AttentionKernel, FitResult, decided, is_open
from forerun.planner.compile.fork_server import NOISE, ForkedWorker, ForkServer, fork_server
from forerun.planner.compile.installed_compilers import compiler_for
from forerun.planner.compile.request import CompileRequest
from forerun.planner.compile.worker import ERROR, FACTS
from forerun.planner.hlo import parse
from forerun.planner.memory import (
    ASSIGNMENT,
    PADDING,
    ModelShapes,
    Unreadable,
    argument_padding,
    hidden_bytes,
    ledger,
    memory_report,
    newest,
)
from forerun.planner.time.prediction import step_time
from forerun.units import MIB, Bytes, Seconds

POLL_SECONDS = 0.02
DECISION_POLL_SECONDS = 0.25  # near the limit, where each poll copies the dump again
DISK_BYTES = 64 * MIB  # ten times the dump of llama3.1-8b on 1,024 chips
LIMIT_ROUNDING_BYTES = 6 * MIB  # limits are known to 0.01 GiB; for peaks closer than this, wait for the compiler
SHOWN_LINES, SHOWN_COLUMNS = 12, 300
DUMP_FLAGS = "--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_step"

OnPhase = Callable[[str], None]


class Stopped(Exception):
    """The compile was cancelled, because another one failed or the user pressed Ctrl-C."""


class CompilerFailure(RuntimeError):
    """The compiler, or the program that forerun built for it, has a bug. Changing the job does not fix it."""


def ask(question: CompileRequest, stop: threading.Event, on_phase: OnPhase) -> FitResult:
    """Compile a request in a child process, and block until the compiler has decided whether the program fits.

    Args:
        question: The job and the slice.
        stop: Cancels the compile when it is set.
        on_phase: Called with 'lower' and 'compile' when these phases begin.

    Returns:
        The compiler's decision, its memory report, and the predicted step time if the program fits.

    Raises:
        UserError: The job cannot run on the slice, or the machine lacks libtpu, disk or memory.
        CompilerFailure: The compiler failed for another reason.
        Stopped: `stop` was set.
    """
    started = time.perf_counter()
    compiler = compiler_for(question.slice)
    compiler.require()
    require_address_space(compiler.address_space_bytes, compiler.name)
    require_disk(Path(tempfile.gettempdir()))
    with (
        fork_server() as server,
        tempfile.TemporaryDirectory(prefix="forerun-plan-", ignore_cleanup_errors=True) as name,
    ):
        folder = Path(name)
        worker = _start(server, question, folder)
        try:
            answer = _watch(worker, folder, question, stop, on_phase)
        finally:
            worker.end()
        details = _with_details(answer, folder, question)
    return replace(details, compile_seconds=Seconds(time.perf_counter() - started))


def verdict(
    question: CompileRequest, stop: threading.Event | None = None, on_phase: OnPhase = lambda phase: None
) -> FitResult:
    """Compile a request like `ask`, or both programs of a request with `unroll: auto`, and return the better one."""
    if is_open(question):
        return decided(question, lambda fixed: verdict(fixed, stop, on_phase))
    return ask(question, stop or threading.Event(), on_phase)


def _with_details(answer: FitResult, folder: Path, question: CompileRequest) -> FitResult:
    """Return `answer` with the breakdown of its memory, and with its step time if it fits.

    Only reads the dumped files: the compiler has ended by now.
    """
    facts, memory = _read(folder / FACTS), answer.memory
    settled = answer.fits or not compiler_for(question.slice).rejects
    files = folder / SETTLED if settled else folder
    module = answer.module or parse(newest(files, SCHEDULED if settled else UNSCHEDULED))
    assignment = newest(files, ASSIGNMENT)
    padding = argument_padding(assignment, facts["arguments"])
    sizes = {"weights": memory.weights_bytes, "optimizer": memory.optimizer_bytes, "batch": memory.batch_bytes}
    arguments = {group: size - padding.get(group, 0) for group, size in sizes.items()}
    parts = ledger(
        assignment,
        newest(files, LIVE_RANGES),
        module,
        {**arguments, PADDING: sum(padding.values())},
        memory.peak_bytes,
        ModelShapes.of(facts["layers"], facts["weights"]),
    )
    if not answer.fits:
        return replace(answer, ledger=parts, module=None)
    flops, own_model = answer.flops_per_step / question.devices, question.resolved.model_facts.is_plugin
    step = step_time(module, question.slice, flops, own_model)
    return replace(answer, ledger=parts, step=step, module=module)


def require_disk(folder: Path, at_least_bytes: int = DISK_BYTES) -> None:
    """Raise an error if the disk of `folder` has less than `at_least_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < at_least_bytes:
        raise StorageError(
            "E-PLAN-005",
            f"the disk is full: {Bytes(free)} left in {folder}",
            why=f"the compiler writes its memory report there, and needs {Bytes(DISK_BYTES)} for each slice",
            fix="free some space, or point TMPDIR at another disk",
        )


def _start(server: ForkServer, question: CompileRequest, folder: Path) -> ForkedWorker:
    """Start a worker that compiles a request and dumps to `folder`."""
    return server.fork(folder, question.to_json(), _environment(question, folder), job_folder())


def _environment(question: CompileRequest, folder: Path) -> dict[str, str]:
    """Return the variables of a compile that dumps to `folder`."""
    compiler = compiler_for(question.slice)
    flags = (os.environ.get("XLA_FLAGS", ""), DUMP_FLAGS.format(folder=folder), compiler.flags)
    return {"XLA_FLAGS": " ".join(filter(None, flags)), **compiler.environment}


def _watch(
    child: ForkedWorker, folder: Path, question: CompileRequest, stop: threading.Event, on_phase: OnPhase
) -> FitResult:
    """Poll the child's files until there is a result. Raise if the child fails or `stop` is set."""
    phase = ""
    answer: FitResult | None = None
    while True:
        # Poll the process before its files: if it has ended, the files that are read below are complete.
        ended = child.poll() is not None
        if (folder / ERROR).exists():
            return _rejected(folder, question)
        facts = _read(folder / FACTS)
        if phase != (phase := "compile" if facts else "lower"):
            on_phase(phase)
        if facts and (answer := _accepted(folder, facts, question, child.pid, ended)):
            limit = question.slice.chip.usable_bytes
            if not compiler_for(question.slice).rejects:
                return _own_decision(answer, folder / SETTLED, limit)
            # Near the limit our figure is too coarse to decide: wait until the compiler does.
            clear = answer.memory.peak_bytes <= limit - LIMIT_ROUNDING_BYTES
            if clear or ended or any(folder.glob(TAKEN)):
                return answer
        if ended:
            assert child.returncode is not None
            raise _no_result_error(child.returncode, folder, question)
        require_disk(folder, at_least_bytes=MIB)
        if stop.wait(POLL_SECONDS if answer is None else DECISION_POLL_SECONDS):
            raise Stopped


def _own_decision(answer: FitResult, files: Path, limit: int) -> FitResult:
    """Return the result of a compiler that rejects nothing: our limit decides, with estimated workspaces included."""
    module = parse(newest(files, SCHEDULED))
    peak = answer.memory.peak_bytes + hidden_bytes(module, newest(files, ASSIGNMENT), newest(files, LIVE_RANGES))
    memory = replace(answer.memory, peak_bytes=Bytes(peak))
    return replace(answer, memory=memory, fits=peak <= limit, module=module)


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file does not exist."""
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return content


def _answer(folder: Path, facts: dict[str, Any], question: CompileRequest, *, fits: bool) -> FitResult:
    """Return the result without its ledger and times, from the reports in `folder`."""
    attention = facts.get("attention")
    return FitResult(
        question,
        memory_report(folder, facts["arguments"]),
        fits,
        Seconds(0.0),
        facts["program"],
        facts["mesh"],
        facts["flops_per_step"],
        facts["tokens_per_step"],
        saved_bytes=facts["saved_bytes"],
        attention=None if attention is None else AttentionKernel(**attention),
    )


def _accepted(
    folder: Path, facts: dict[str, Any], question: CompileRequest, pid: int, ended: bool = False
) -> FitResult | None:
    """Return the result, or None if the compiler (process `pid`) has not written all files yet."""
    try:
        return _answer(copy_dump(folder, pid, ended), facts, question, fits=True)
    except (Unreadable, FileNotFoundError):
        return None


def _rejected(folder: Path, question: CompileRequest) -> FitResult:
    """Return the result of a program that is too large for HBM; raise any other error of the compile."""
    error, facts, name = _read(folder / ERROR), _read(folder / FACTS), question.slice.name
    if "what" in error:
        raise UserError(error["code"], f"{name}: {error['what']}", why=error["why"], fix=error["fix"])
    text = error.get("compiler", "")
    if "RESOURCE_EXHAUSTED" in text and "hbm" in text.lower():
        try:
            return _answer(folder, facts, question, fits=False)
        except Unreadable as unreadable:
            raise CompilerFailure(f"{name}: {_excerpt(text)}\n{unreadable}") from unreadable
    model = question.job.model
    said = _excerpt(text) if text else f"{_excerpt(error['failure'])}\n{error['where']}"
    if question.resolved.model_facts.is_plugin:
        raise UserError(
            "E-PLAN-007",
            f"{name}: model {model.name!r} does not {'compile' if text else 'run'}",
            why=said,
            fix="fix the model; forerun.models.base.Model describes its interface",
        )
    if question.job.objective is not None:
        raise UserError(
            "E-PLAN-008",
            f"{name}: objective {question.job.objective.name!r} does not {'compile' if text else 'run'}",
            why=said,
            fix="fix the objective, see docs/how-to/own.md; run with objective=null to check whether it is the cause",
        )
    failure = f"{compiler_for(question.slice).name} failed" if text else "the program could not be built"
    raise CompilerFailure(f"{failure} on {name}: {said}")


def _no_result_error(code: int, folder: Path, question: CompileRequest) -> Exception:
    """Return the error for a child that ended without a result and without a Python exception."""
    name = question.slice.name
    if code == -signal.SIGKILL:
        return UserError(
            "E-PLAN-009",
            f"{name}: the compiler was killed",
            why="Linux kills processes when memory runs out, and a compile for many chips takes several GiB",
            fix="name fewer slices at a time after --on, or use a machine with more memory",
        )
    said = _excerpt((folder / NOISE).read_text("utf-8", errors="replace"), last=True)
    if (limit_bytes := address_space_bytes()) is not None:
        limited = f"the address space is limited to {Bytes(limit_bytes)}, and large programs need more than that"
        return UserError(
            "E-PLAN-010",
            f"{name}: the compiler ended without a result ({_exit_text(code)})",
            why=f"{limited}\n{said}".rstrip(),
            fix="ulimit -v unlimited, then the same command",
        )
    if code == 0:
        said = f"it wrote no readable memory report\n{said}"
    failure = f"{compiler_for(question.slice).name} ended on {name} without a result ({_exit_text(code)}): {said}"
    return CompilerFailure(failure.rstrip(": \n"))


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _excerpt(text: str, last: bool = False) -> str:
    """Return the first (or last) dozen lines of a text, each cut to SHOWN_COLUMNS."""
    lines = [line[:SHOWN_COLUMNS].rstrip() for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[-SHOWN_LINES:] if last else lines[:SHOWN_LINES])
