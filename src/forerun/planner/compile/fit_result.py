"""Whether a job fits a slice: the compiler's result, together with figures of the slice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest
from forerun.planner.compile.unrolling import UnrollChoice, decided, is_open
from forerun.planner.hlo import Module
from forerun.planner.memory.memory_report import MemoryReport
from forerun.planner.time.step_time import StepTime
from forerun.units import Bytes, Seconds


@dataclass(frozen=True)
class FitResult:
    """The result of compiling a job for a slice. Bytes are per device unless noted."""

    question: CompileRequest
    memory: MemoryReport
    fits: bool  # as the TPU compiler decided; for a GPU, whether the peak is within the limit
    compile_seconds: Seconds  # from the start of the compiler's process to its decision
    program: str  # hash of the lowered program
    mesh: str
    flops_per_step: float  # of the model, over all devices; causal attention is counted once
    tokens_per_step: int
    ledger: Mapping[str, Bytes]  # contents of the memory at its peak; adds up to the peak
    step: StepTime | None  # None if the job does not fit
    saved_bytes: int | None = None  # of a checkpoint, over all devices; None: all weights and the optimizer
    attention: compiler.AttentionKernel | None = None  # None for a model without attention
    unroll: UnrollChoice | None = None  # None unless the job says `unroll: auto`

    @property
    def limit_bytes(self) -> Bytes:
        """Memory of one device that a program can use: of a TPU known to 0.01 GiB, of a GPU the share of `train`."""
        return Bytes(self.question.slice.chip.usable_bytes)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens_per_step / self.step.mid_seconds if self.step else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs per second as a share of the bf16 peak of the devices in use, as in `train`."""
        peak = self.question.slice.chip.bf16_flops_per_device
        if self.step is None or peak is None:
            return None
        return self.flops_per_step / self.step.mid_seconds / (peak * self.question.devices)

    @property
    def spare_bytes(self) -> Bytes:
        """Unused bytes of HBM; negative if the job does not fit."""
        return Bytes(self.limit_bytes - self.memory.peak_bytes)


def verdict(
    question: CompileRequest,
    stop: threading.Event | None = None,
    on_phase: compiler.OnPhase = lambda phase: None,
    keep: Callable[[Module], None] = lambda module: None,
) -> FitResult:
    """Compile a request and return the result. Blocks until the compiler has decided, or `stop` is set.

    `keep` receives the scheduled program if it fits. Raises the errors of `compiler.ask`.
    """
    if is_open(question):
        best: FitResult = decided(question, lambda one, kept: verdict(one, stop, on_phase, kept), keep)
        return best
    started = time.perf_counter()
    answer = compiler.ask(question, stop or threading.Event(), on_phase)
    seconds = Seconds(time.perf_counter() - started)
    if answer.module is not None:
        keep(answer.module)
    return FitResult(
        question,
        answer.memory,
        answer.accepted,
        seconds,
        answer.program,
        answer.mesh,
        answer.flops_per_step,
        answer.tokens_per_step,
        answer.ledger,
        answer.step,
        answer.saved_bytes,
        answer.attention,
    )
