"""Trials of a tracker that fails a real run: `MODE` from the start, `MODE-later` in the middle.

The run must be EXACT, and in the end (of it, or of the same command started again when the tracker is back) the tracker
has every row once and in order. `step_ratio`: the median step beside that of the same run without a tracker.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "track"))

from mlflow_server import MlflowServer
from runs import Bench, Outcome, Run

MODES = ("500", "hang", "slow", "lost", "close", "dns")
KINDS = tuple(f"{mode}{when}" for mode in MODES for when in ("", "-later"))

TRIES = 5  # of the same command: a run waits for five seconds at its end, and a busy machine may pause for as long
UNDELIVERED = "does not have all rows"


@cache
def bench() -> tuple[Bench, Outcome]:
    made = Bench(Path(tempfile.mkdtemp(prefix="tracker")), steps=60)
    return made, made.reference()


def step_seconds(run: Run) -> float:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_seconds"] for row in rows[5:])


def trial(kind: str, seed: int) -> dict[str, Any]:
    made, expected = bench()
    mode, _, later = kind.partition("-")
    chance = random.Random(f"tracker {kind} {seed}")
    server = MlflowServer("" if later or mode == "dns" else mode)
    with server.serve() as url, made.run(f"{kind}-{seed}") as run:
        words = ["track=mlflow", f"track.url={'http://nobody.invalid:5000' if mode == 'dns' else url}"]
        run.start(*words)
        if later and mode != "dns":
            run.wait_for_new_step(chance.randrange(10, 30))
            server.mode = mode
        run.finish()
        differs = run.outcome().differs_in(expected)
        delivered = len({step for _, step, _ in server.rows()})
        ratio = step_seconds(run) / step_seconds(made.run("reference"))
        server.mode = ""
        for _ in range(TRIES):
            run.start("track=mlflow", f"track.url={url}")
            run.finish()
            if UNDELIVERED not in run.said_now():
                break
        rows = [(step, float(value).hex()) for key, step, value in server.rows() if key == "loss"]
    wanted = list(expected.losses.items())
    about = {"fault": f"tracker-{kind}", "trial": seed, "exact": not differs, "differs": differs}
    about |= {"delivered_in_the_run": delivered, "lost": len(set(wanted) - set(rows))}
    about |= {"doubled": len(rows) - len(set(rows)), "in_order": rows == sorted(rows), "step_ratio": round(ratio, 3)}
    return {**about, "told": "mlflow does not" in run.said(), "ok": not differs and rows == wanted}
