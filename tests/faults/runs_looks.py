"""SIGTERM inside a look at the validation: `python tests/faults/runs_looks.py TRIALS`, one JSON line per trial.

The run looks at the documents that it kept back after every fifth step, for about as long as the five steps took; it
is stopped inside of a look, saves within its grace, and is started again. That the signal fell inside is proven by what
is not there: the look of the step that was saved. At the end the run must be EXACT (`runs.py`), and every look the same
as that of the run that nothing happened to. The run goes on when the look was over before the signal came (`inside`).
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rig import print_lines
from runs import JOB, TEXT, Bench, Outcome, Run

from forerun.exit_codes import STOPPED

GRACES = (30, 10, 3)
HITS_OF_A_RUN = 10
EVERY = 5
LOOKING = JOB.replace("path: text", "path: rows, validation: 0.4, packing: whole")
LOOKING += "validation: {{every: {every}, batches: 60}}\n"


def bench_in(folder: Path, steps: int = 100) -> Bench:
    """The book by its paragraphs, some of which can be kept back."""
    bench = Bench(folder, steps=steps, every=EVERY, job=LOOKING)
    (folder / "rows").mkdir()
    paragraphs = (" ".join(part.split()) for part in TEXT.read_text().split("\n\n") if part.strip())
    (folder / "rows" / "book.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))
    return bench


def looking(run: Run, after: int) -> bool:
    """Whether a look is under way, at a step past `after`."""
    step = run.last_step()
    return step > after and step % EVERY == 0 and step not in run.looks()


def stopped(run: Run, number: int, grace: int) -> dict[str, Any] | None:
    """One stop and nothing started again; None if the run was over before."""
    chance = random.Random(f"looks {number}")
    before = run.last_step()
    supervise = number % 2 == 1
    run.start(supervise=supervise)
    if not run.wait_for(lambda: looking(run, before), every=0.002):
        return None
    time.sleep(chance.uniform(0, 0.25))
    sent = run.kill(run.process.pid, signal.SIGTERM)
    try:
        code = run.process.wait(max(0.0, sent + grace - time.time()))
    except subprocess.TimeoutExpired:  # the machine is taken away, with all that is on it
        run.kill(run.process.pid)
        code = -9
    at, newest = run.last_step(), run.newest()
    return {
        "fault": "looks",
        "trial": number,
        "supervised": supervise,
        "grace_seconds": grace,
        "code": code,
        "inside": at % EVERY == 0 and at not in run.looks(),
        "stop_seconds": round(time.time() - sent, 2),
        "step": at,
        "lost_steps": at - newest,
        "good": code == STOPPED and newest == at,
    }


def trials_of(bench: Bench, expected: Outcome, looks: dict[int, str], trials: int) -> Iterator[dict[str, Any]]:
    number = 0
    while number < trials:
        lines: list[dict[str, Any]] = []
        with bench.run(f"stopped-{number}") as run:
            for trial in range(number, min(number + HITS_OF_A_RUN, trials)):
                line = stopped(run, trial, GRACES[trial % len(GRACES)])
                if line is None:
                    break
                lines.append(line)
            if run.over and run.process.returncode != 0:
                run.start()
            run.finish()
            exact = run.outcome().differs_in(expected) == [] and run.looks() == looks
        number += len(lines)
        yield from ({**line, "exact": exact, "ok": line["good"] and exact} for line in lines)


def lines(trials: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        bench = bench_in(Path(folder, "bench"))
        expected = bench.reference()
        yield from trials_of(bench, expected, bench.run("reference").looks(), trials)


if __name__ == "__main__":
    sys.exit(print_lines(lines(int(sys.argv[1]))))
