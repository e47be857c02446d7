"""One bit flips in one host's copy of the weights: `python tests/faults/runs_flip.py TRIALS`, one JSON line per trial.

Three hosts hold the same state and compare it every few steps (`guard.compare_every`). An objective of the user's own,
beside the job, flips a bit of the weights on one host before one step, once. The run must name that host, must not save
what it damaged, and goes on by itself from the newest checkpoint, EXACT (`runs.py`). `late_steps`: from the flip to its
finding. A bit of low worth changes no loss that anybody would notice: nothing but the comparison finds it.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rig import print_lines
from runs import JOB, Bench, Outcome
from runs_hosts import HostsRun, reference

HOSTS, STEPS, EVERY = 3, 24, 5
COPIED = (
    JOB.replace("batch: 8", f"batch: {2 * HOSTS}")
    + f"""\
objective: "flipping:Flipping"
mesh: {{{{data: {HOSTS}, fsdp: 1, tp: 1}}}}
guard: {{{{compare_every: 2}}}}
"""
)
FLIPPING = '''\
"""The next token's loss; the file `flip` beside the job says when a bit flips, on which host, and which bit."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from forerun.run.steps import StepPipeline
from forerun.objectives.next_token import NextToken

FLIP = Path(__file__).with_name("flip")
dispatch = StepPipeline.dispatch


@dataclass(frozen=True)
class Flipping(NextToken):
    pass


def flipping(self, step, batch):
    try:
        wanted = json.loads(FLIP.read_text())
    except FileNotFoundError:  # also if the host that it is for removes it right now
        wanted = {}
    if wanted.get("host") == jax.process_index() and wanted["step"] == step:
        FLIP.unlink()
        array = self.state.params.embed
        [shard] = array.addressable_shards
        raw = np.array(shard.data)
        raw.view(np.uint32).reshape(-1)[wanted["at"] % raw.size] ^= np.uint32(1 << wanted["bit"])
        parts = [jax.device_put(raw, shard.device)]
        damaged = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
        self.state = replace(self.state, params=replace(self.state.params, embed=damaged))
    dispatch(self, step, batch)


StepPipeline.dispatch = flipping
'''
FOUND = re.compile(r"error: step (\d+): silent corruption on host (\d+) device")


def bench_in(folder: Path) -> Bench:
    bench = Bench(folder, steps=STEPS, every=EVERY, job=COPIED)
    (folder / "flipping.py").write_text(FLIPPING)
    return bench


def trial(bench: Bench, expected: Outcome, number: int) -> dict[str, Any]:
    chance = random.Random(f"flip {number}")
    flip = {"host": number % HOSTS, "step": chance.randrange(7, STEPS - 2), "bit": chance.randrange(0, 12)}
    file = bench.folder / "flip"
    file.write_text(json.dumps({**flip, "at": chance.randrange(1 << 20)}))
    with HostsRun(bench, f"flipped-{number}", HOSTS) as job:
        codes = job.start_all().wait()
        found = FOUND.search(job.said())
        exact = codes == [0] * HOSTS and job.run.outcome().differs_in(expected) == []
    flipped = not file.exists()
    at, host = (int(found[1]), int(found[2])) if found else (None, None)
    return {
        "fault": "flip",
        "trial": number,
        **flip,
        "flipped": flipped,
        "found_at": at,
        "named": host,
        "late_steps": None if at is None else at - flip["step"],
        "exact": exact,
        "ok": flipped and exact and host == flip["host"],
    }


def trials(count: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        bench = bench_in(Path(folder, "bench"))
        expected = reference(bench, HOSTS)
        for number in range(count):
            yield trial(bench, expected, number)


if __name__ == "__main__":
    sys.exit(print_lines(trials(int(sys.argv[1]))))
