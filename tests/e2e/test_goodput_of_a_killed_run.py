"""The goodput of a run that was killed and resumed, compared with the times that are measured from outside.

It takes two processes that compile a tiny model, about ten seconds of CPU.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from runs import Bench

from forerun.track.event_log import read_events
from forerun.track.goodput import goodput_of
from forerun.track.metrics import read_metrics

pytestmark = pytest.mark.timing

STEPS, SAVED, REACHED = 60, 50, 53
JOB = """\
model: {{layers: 1, embed: 16, heads: 2}}
data: text
sequence: 16
batch: 8
steps: {steps}
device: cpu
devices: 1
precision: {{compute: float32}}
checkpoint: {{every: {every}}}
sample: {{tokens: 0}}
"""
TICK_SECONDS = 0.02  # the start of a process is known in hundredths of a second


def test_goodput_of_a_killed_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "bench", steps=STEPS, every=SAVED, job=JOB)
    with bench.run("killed") as run:
        folder = run.folder

        def has_reached() -> bool:
            """Whether a step after the checkpoint is timed. These steps are slow, so the run is not at its end."""
            timed = [event["step"] for event in read_events(folder / "events.jsonl") if event["event"] == "time"]
            return max(timed, default=0) >= REACHED and run.newest() == SAVED

        # ---- The first session: killed after the checkpoint ----
        with bench.held_back(SAVED + 1, STEPS, step_seconds=2.0):
            before = time.time()
            run.start(devices=1)
            began = time.time()
            assert run.wait_for(has_reached), run.said()
            run.kill(run.worker())
            killed = time.time()
        time.sleep(0.5)

        # ---- The second session: to the end ----
        resumed = time.time()
        run.start(devices=1)
        run.finish()
        ended = time.time()

    summary = json.loads((folder / "summary.json").read_text())["goodput"]
    seconds, events = summary["seconds"], read_events(folder / "events.jsonl")
    found = goodput_of(events)
    assert found is not None
    assert found.as_dict() == summary
    assert sum(round(part * 1e6) for part in seconds.values()) == round(summary["wall_seconds"] * 1e6)
    assert resumed - began < summary["wall_seconds"] < ended - before + TICK_SECONDS
    assert seconds["restarts"] > resumed - killed - TICK_SECONDS
    assert seconds["replayed"] > 2.0 * (REACHED - SAVED - 1)  # these steps were held for two seconds each
    for name in ("useful", "startup", "compile", "restore", "saves"):
        assert seconds[name] > 0, name
    assert seconds["startup"] > 0.5  # two processes import jax
    assert [event["step"] for event in events if event["event"] == "resume"] == [SAVED]
    assert events[-1]["event"] == "end"
    assert [event["session"] for event in events if event["event"] == "start"] == [1, 2]

    rows = read_metrics(folder / "metrics.jsonl")
    for row in rows:
        shares = [value for name, value in row.items() if name == "goodput" or name.startswith("lost_")]
        assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert rows[SAVED - 1]["lost_replayed"] == 0
    assert rows[SAVED]["lost_replayed"] > 0
    assert rows[-1]["goodput"] == pytest.approx(summary["share"], rel=0.2)
