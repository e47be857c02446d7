"""What a simulated device does between two moments: one instruction on the core, or one transfer on a queue."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.planner.hlo import Instruction

CORE = "core"


@dataclass(frozen=True, slots=True)
class Activity:
    """One entry of the timeline of a computation. Times count from the start of the computation."""

    lane: str  # CORE, or the name of a queue such as "ici"
    start_seconds: float
    seconds: float
    instruction: Instruction
    kind: str = ""  # what the core did or waited for; empty on a queue and for a call
    flops: float = 0.0
    size_bytes: float = 0.0  # on the core: bytes of HBM that it reads and writes; on a queue: bytes of the operands
    overhead_seconds: float = 0.0  # fixed part of `seconds`
    called: str = ""  # the computation that runs inside, `trips` times
    trips: int = 1

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds
