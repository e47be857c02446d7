"""All time limits of supervision: when a host or a worker counts as lost, stalled or missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Seconds that a worker may spend in a phase without reporting progress. Storage calls retry while a bucket is
# unavailable, and an outage of half an hour must not count as a stall.
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
    """Limits in seconds; `stall_steps`, `stall` and `restarts` are numbers.

    A job that makes steps is stalled after `stall` x max(`stall_floor`, `stall_steps` x p99 step time) without a step.
    """

    beat: float = 0.5  # between two beats
    lost: float = 5.0  # without a message, until a host or the leader counts as lost
    gather: float = 300.0  # for all hosts to connect when the job starts
    reconnect: float = 600.0  # for hosts and leader to connect again later
    handshake: float = 5.0  # for a new connection to authenticate itself
    settle: float = 0.4  # after the first worker exits: its peers fail too, and the cause must be found among them
    stacks: float = 2.0  # for all hosts to send the stacks of their workers
    stall_floor: float = 10.0
    stall_steps: float = 5.0
    stall: float = 0.85  # below 1: the rest is for reporting the stall and collecting stacks
    grace: float = 30.0  # from the announcement of a stop to its deadline, if the announcement names none
    restarts: int = 5  # in succession, without a new step
    backoff: float = 1.0  # before the second restart without progress, then twice as long each time
    backoff_most: float = 60.0
    storage: float = 3600.0  # for a failing disk or bucket to recover, from the last new step on
    phases: Mapping[str, float] = field(default_factory=lambda: PHASE_SECONDS)

    def phase_seconds(self, phase: str) -> float:
        """Return how long a worker may report no progress in a phase."""
        return self.phases.get(phase, OTHER_PHASE_SECONDS)

    def restart_delay_seconds(self, fruitless: int) -> float:
        """Return the delay of a restart. `fruitless` counts the restarts without progress, including this one."""
        return 0.0 if fruitless <= 1 else min(self.backoff * 2 ** (fruitless - 2), self.backoff_most)
