"""Tests of the leader's decisions, over thousands of random orders of events and without a process.

`leader_world` has the invariants: one attempt at a time, all workers ended before the next attempt, a limited number of
attempts, a stop on which all hosts agree, a save only if it fits, nothing after the end, and an end of every job. A job
with slices continues with complete ones only, after the waiting time, and never without the first.
"""

from __future__ import annotations

from collections import Counter

import pytest
from leader_world import World

JOBS = 2000
BLOCK = 500


@pytest.mark.parametrize("first", range(0, JOBS, BLOCK))
def test_every_order_of_events_keeps_the_invariants_and_ends(first: int) -> None:
    seen, codes = Counter[str](), Counter[int]()
    for seed in range(first, first + BLOCK):
        world = World(seed)
        codes[world.run().code] += 1
        seen.update(world.seen)
    # The simulation is worth nothing if it does not reach everything that the leader can do.
    assert set(codes) == {0, 2, 70, 74, 75}
    actions = {"StartWorkers", "EndWorker", "AskUnits", "StopAfter", "AskStacks", "KeepStacks", "CloseTunnels"}
    assert actions <= set(seen)
    assert min(seen["save approved"], seen["save refused"]) > 0
    assert min(seen["fewer slices"], seen["more slices"]) > 0
    assert codes[0] > BLOCK / 3, "most faults are survived"
