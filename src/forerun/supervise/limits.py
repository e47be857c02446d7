"""How long anything may take under a supervisor before it counts as lost, stalled or missing. All are stated here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STOPPED = 75  # exit code: stopped as asked, can be resumed (EX_TEMPFAIL)
DAMAGED = 76  # exit code: what is in memory cannot be trusted; to be started again from the newest checkpoint
ENDED = 70  # exit code: given up after restarts without progress, or a host or the leader stayed away

# Seconds that a phase may last without a word. A bucket may be away for half an hour, and is waited for.
PHASE_SECONDS: Mapping[str, float] = {
    "start": 600,
    "data": 4 * 3600,
    "compile": 2 * 3600,
    "restore": 3600,
    "save": 3600,
    "evaluate": 3600,
    "finish": 1800,
    "first steps": 900,
    "waiting for data": 2400,
}
OTHER_PHASE_SECONDS = 3600.0


@dataclass(frozen=True)
class Limits:
    """Seconds, except the counts. A stall is no step for `stall` x max(`stall_floor`, `stall_steps` x p99 step)."""

    beat: float = 0.5
    lost: float = 5.0
    gather: float = 300.0  # for all hosts to come at the start of an attempt
    reconnect: float = 600.0  # for the leader to come back
    handshake: float = 5.0
    settle: float = 0.4  # from the first death, for those that follow from it to be told apart from their cause
    stacks: float = 2.0
    stall_floor: float = 10.0
    stall_steps: float = 5.0
    stall: float = 0.85  # the rest is for telling, and for taking the stacks
    grace: float = 30.0
    restarts: int = 5  # without a new step
    backoff: float = 1.0  # before the second restart without progress, then twice as long each time
    backoff_most: float = 60.0
    storage: float = 3600.0  # for a disk or a bucket to be well again, from the last new step on
    phases: Mapping[str, float] = field(default_factory=lambda: PHASE_SECONDS)

    def phase_seconds(self, phase: str) -> float:
        return self.phases.get(phase, OTHER_PHASE_SECONDS)

    def restart_delay_seconds(self, fruitless: int) -> float:
        """`fruitless`: restarts without progress so far, this one counted. The first comes at once."""
        return 0.0 if fruitless <= 1 else min(self.backoff * 2 ** (fruitless - 2), self.backoff_most)
