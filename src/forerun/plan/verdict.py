"""Does a job fit a slice? The compiler's answer with the slice's own figures beside it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from forerun.plan import compiler
from forerun.plan.memory import MemoryReport
from forerun.plan.question import Question
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

    @property
    def limit_bytes(self) -> Bytes:
        """What the compiler lets one device use, known to 0.01 GiB."""
        usable = self.question.slice.chip.usable_bytes
        assert usable is not None, "TPU chips all have it"
        return Bytes(usable)

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
    return Verdict(question, answer.memory, answer.accepted, seconds, answer.program, answer.mesh)
