"""Trials of a clock that jumps by three days, with libfaketime: between restarts (`restarts`), and in a supervised run
(`run`). The monotonic clock goes on, as it does when a real clock is set."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

from tracker_trials import bench

KINDS = ("restarts", "run")
JUMPS = ("+3d", "-3d", "+0d")


def library() -> Path | None:
    """libfaketime for processes with threads (Debian: faketime)."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return found[0] if found else None


def trial(kind: str, seed: int) -> dict[str, Any]:
    made, expected = bench()
    chance = random.Random(f"clock {kind} {seed}")
    jumps = chance.sample(JUMPS, 3)
    clock = made.folder / f"clock-{kind}-{seed}"
    environment = {
        "LD_PRELOAD": str(library()),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    wrong: list[str] = []
    with made.run(f"{kind}-{seed}") as run:
        for number, jump in enumerate(jumps):
            clock.write_text(jump)
            if kind == "restarts" or number == 0:
                newest = run.newest()
                run.start(environment=environment, supervise=kind == "run")
            if number < 2:
                run.wait_for_new_step(run.last_step() + chance.randrange(5, 15))
            if kind == "restarts":
                if number < 2:
                    run.kill(run.worker())
                else:
                    run.finish()
                wrong += [f"{jump}: resumed at {at}, not {newest}" for at in run.resumed_at() if at != newest]
        if kind == "run":
            run.finish()
            wrong += [f"restarted at {run.resumed_at()}"] if len(run.resumed_at()) else []
        differs = run.outcome().differs_in(expected)
    about = {"fault": f"clock-{kind}", "trial": seed, "jumps": jumps, "exact": not differs, "wrong": wrong}
    return {**about, "differs": differs, "ok": not differs and not wrong}
