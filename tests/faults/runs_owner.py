"""Two processes that both think they own a run: `python tests/faults/runs_owner.py FAULT TRIALS`, a line per trial.

    python tests/faults/runs_owner.py reject 30     # a second `forerun train` of a run that is under way
    python tests/faults/runs_owner.py second 30     # the same with --take-over
    python tests/faults/runs_owner.py late 30       # the first wakes up when the second has made steps, or has ended

The first stands still while the second starts, so that it is not over before; then both go on. Without --take-over the
second must be rejected before it reads the data, and the first must not notice it. With it, the first must be refused
its next commit and leave, and every commit after the second's claim must be the second's. The run must be EXACT
(`runs.py`) in all cases.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rig import print_lines
from runs import Bench, Outcome, Run

from forerun.checkpoint.log import Claim, Commit, Log
from forerun.storage.folder import LocalFolder

USER_ERROR = 2


def trial(bench: Bench, expected: Outcome, fault: str, number: int) -> dict[str, Any]:
    chance = random.Random(f"{fault} {number}")
    name = f"{fault}-{number}"
    with bench.run(name) as first, bench.run(name) as second:
        first.start()
        first.wait_for_new_step(chance.randrange(bench.every + 1, bench.steps // 3))
        if chance.random() < 0.5:
            first.wait_for(first.uncommitted, every=0.001)
        time.sleep(chance.uniform(0, 0.2))
        inside = bool(first.uncommitted())
        first.kill(first.process.pid, signal.SIGSTOP)
        second.log_file = second.log_file.with_suffix(".second.log")
        if fault == "reject":
            return rejected(first, second, expected, number)
        second.start("--take-over")
        second.wait_for(lambda: len(claims(second)) >= 2)
        if fault == "late":
            if chance.random() < 0.5:
                second.finish()
            else:
                second.wait_for_new_step(second.last_step() + chance.randrange(1, 10))
        first.kill(first.process.pid, signal.SIGCONT)
        code = first.process.wait(600)
        second.finish()
        commits = second.commits()
        double = [
            commit.step for commit in commits if commit.fence != claims(second)[-1].number and after(second, commit)
        ]
        different = second.outcome().differs_in(expected)
        refused = "another process has taken this run over" in first.said_now()
        return {
            "fault": fault,
            "trial": number,
            "inside_a_save": inside,
            "code_of_the_first": code,
            "refused": refused,
            **({} if refused else {"told": first.said_now()[-600:]}),
            "double_commits": len(double),
            "exact": not different,
            **({"differs": different} if different else {}),
            "ok": not double and not different and code == USER_ERROR and refused,
        }


def rejected(first: Run, second: Run, expected: Outcome, number: int) -> dict[str, Any]:
    """Start the second while the first is stopped, then let the first finish."""
    second.start()
    code = second.process.wait(600)
    first.kill(first.process.pid, signal.SIGCONT)
    first.finish()
    different = first.outcome().differs_in(expected)
    named, read = f"process {first.process.pid} on " in second.said_now(), "data ..." in second.said_now()
    return {
        "fault": "reject",
        "trial": number,
        "code_of_the_second": code,
        "owner_named": named,
        "data_read": read,
        "claims": len(claims(first)),
        "exact": not different,
        **({"differs": different} if different else {}),
        "ok": code == USER_ERROR and named and not read and len(claims(first)) == 1 and not different,
    }


def claims(run: Run) -> list[Claim]:
    if not run.checkpoints.exists():
        return []
    return [record for record in Log(LocalFolder(run.checkpoints)).records() if isinstance(record, Claim)]


def after(run: Run, commit: Commit) -> bool:
    return commit.number > claims(run)[-1].number


def trials(fault: str, count: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder, "bench"), steps=60)
        expected = bench.reference()
        for number in range(count):
            yield trial(bench, expected, fault, number)


if __name__ == "__main__":
    sys.exit(print_lines(trials(sys.argv[1], int(sys.argv[2]))))
