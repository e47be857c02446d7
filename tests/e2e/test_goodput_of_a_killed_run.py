"""The goodput of a run that was killed and resumed, compared with the times that are measured from outside.

It takes two processes that compile a tiny model, about ten seconds of CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from forerun.checkpoint.reader import Reader
from forerun.track.event_log import read_events
from forerun.track.goodput import goodput_of
from forerun.track.metrics import read_metrics

pytestmark = pytest.mark.timing

PATIENCE_SECONDS = 300
ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED, REACHED = 60, 50, 53
JOB = f"""\
name: killed
model: {{layers: 1, embed: 16, heads: 2}}
data: text
sequence: 16
batch: 8
steps: {STEPS}
device: cpu
devices: 1
precision: {{compute: float32}}
checkpoint: {{every: {SAVED}}}
sample: {{tokens: 0}}
"""
TICK_SECONDS = 0.02  # the start of a process is known in hundredths of a second


def test_goodput_of_a_killed_run(shell: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    shutil.copy(ROOT / "examples" / "quickstart" / "text" / "carroll-alice.txt", tmp_path / "text")
    (tmp_path / "job.yaml").write_text(JOB)
    brake, folder = tmp_path / "brake", tmp_path / "runs" / "killed"
    environment = {
        **shell,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests/faults/brake"), shell.get("PYTHONPATH")])),
        "FORERUN_TEST_BRAKE": str(brake),
    }

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(
                ["forerun", "train", "job.yaml"], cwd=tmp_path, env=environment, stdout=log, stderr=log
            )

    def has_reached() -> bool:
        """Whether a step after the checkpoint is timed. These steps are slow, so the run is not at its end."""
        timed = [event["step"] for event in read_events(folder / "events.jsonl") if event["event"] == "time"]
        return max(timed, default=0) >= REACHED and Reader(folder / "checkpoints").steps() == [SAVED]

    # ---- The first session: killed after the checkpoint ----
    brake.write_text(json.dumps({"first": SAVED + 1, "last": STEPS, "step_seconds": 2.0}))
    before = time.time()
    child = start()
    began = time.time()
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not has_reached():
            assert child.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    killed = time.time()
    brake.unlink()
    time.sleep(0.5)

    # ---- The second session: to the end ----
    resumed = time.time()
    assert start().wait(PATIENCE_SECONDS) == 0, (tmp_path / "log").read_text()
    ended = time.time()

    summary = json.loads((folder / "summary.json").read_text())["goodput"]
    seconds, events = summary["seconds"], read_events(folder / "events.jsonl")
    found = goodput_of(events)
    assert found is not None
    assert found.as_dict() == summary
    assert sum(round(part * 1e6) for part in seconds.values()) == round(summary["wall_seconds"] * 1e6)
    assert resumed - began < summary["wall_seconds"] < ended - before + TICK_SECONDS
    assert seconds["restarts"] > resumed - killed - TICK_SECONDS
    assert seconds["replayed"] > 2.0 * (REACHED - SAVED - 1), "these steps were held for two seconds each"
    for name in ("useful", "startup", "compile", "restore", "saves"):
        assert seconds[name] > 0, name
    assert seconds["startup"] > 0.5, "two processes import jax"
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
