"""Does a job fit a slice? The compiler's answer with the slice's own figures beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from forerun.plan import compiler
from forerun.plan.memory import MemoryReport
from forerun.plan.question import Question
from forerun.plan.step_time import StepTime
from forerun.units import Bytes, Seconds


@dataclass(frozen=True)
class Verdict:
    """`fits` is the compiler's own word; `compile_seconds` run from the start of its process to that word."""

    question: Question
    memory: MemoryReport
    fits: bool
    compile_seconds: Seconds
    program: str
    mesh: str
    flops_per_step: float  # the model's own work, causal attention counted once
    tokens_per_step: int
    ledger: Mapping[str, Bytes]  # what fills the memory at its fullest; adds up to the peak
    step: StepTime | None  # None if it does not fit
    saved_bytes: int | None = None  # of a checkpoint, over all devices; None: all weights and the optimizer

    @property
    def limit_bytes(self) -> Bytes:
        """What the compiler lets one device use, known to 0.01 GiB."""
        usable = self.question.slice.chip.usable_bytes
        assert usable is not None, "TPU chips all have it"
        return Bytes(usable)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens_per_step / self.step.mid_seconds if self.step else None

    @property
    def mfu(self) -> float | None:
        """Return the share of the bf16 peak that the model's own work reaches, of the devices in use as in `train`."""
        peak = self.question.slice.chip.bf16_flops_per_device
        if self.step is None or peak is None:
            return None
        return self.flops_per_step / self.step.mid_seconds / (peak * self.question.devices)

    @property
    def spare_bytes(self) -> Bytes:
        """Left over if positive, short if negative."""
        return Bytes(self.limit_bytes - self.memory.peak_bytes)


def verdict(
    question: Question, stop: threading.Event | None = None, on_phase: compiler.Phase = lambda phase: None
) -> Verdict:
    """Blocks until the compiler has decided; `stop` ends it sooner."""
    started = time.perf_counter()
    answer = compiler.ask(question, stop or threading.Event(), on_phase)
    seconds = Seconds(time.perf_counter() - started)
    return Verdict(
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
    )
