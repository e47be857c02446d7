"""Trials of a disk that fills up (`full`, needs root) or fails (`eio`, needs strace) for seconds under a real run.

Every second run has a supervisor, which waits for the disk; one without is started again when the disk is back, if it
has left, and then it must have said what to do. What was committed before must be there throughout, nothing may be left
that no record names, and the run must be EXACT at its end.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

from needs import fill_disk
from rig import attached_strace
from runs import PATIENCE_SECONDS, Bench, Outcome

from forerun.exit_codes import STORAGE_FAILED

DISK_BYTES = 200 << 20
KINDS = ("full", "eio")
CALLS = "mkdir,writev,fsync,link"


@cache
def bench() -> tuple[Bench, Outcome]:
    """With a disk of its own for the runs."""
    made = Bench(Path(tempfile.mkdtemp(prefix="disk")), steps=60)
    disk = made.folder / "runs"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True)
    return made, made.reference()


def end() -> None:
    if bench.cache_info().currsize:
        made, _ = bench()
        subprocess.run(["umount", "--lazy", str(made.folder / "runs")], check=True)
        shutil.rmtree(made.folder)


def trial(kind: str, seed: int) -> dict[str, Any]:
    made, expected = bench()
    chance = random.Random(f"disk {kind} {seed}")
    disk, ballast = made.folder / "runs", made.folder / "runs" / "ballast"
    with made.run(f"{kind}-{seed}") as run:
        run.start(supervise=seed % 2 == 1)
        run.wait_for_new_step(chance.randrange(6, 30))
        before = [commit.number for commit in run.commits()]
        broken = time.time()
        if kind == "full":
            fill_disk(disk, chance.choice((0, 4096, 1 << 20)))
        else:
            tracer = attached_strace(run.worker(), CALLS, "error=EIO")
        time.sleep(chance.uniform(1, 4))
        while_broken = [commit.number for commit in run.commits()]
        if kind == "full":
            ballast.unlink()
        else:
            tracer.terminate()
            tracer.communicate()
        healed, left = time.time(), run.process.wait(PATIENCE_SECONDS)
        if left:
            run.start()
            run.finish()
        said = run.said()
        differs = run.outcome().differs_in(expected)
        leftovers = run.uncommitted()
    shutil.rmtree(run.folder)
    intact = set(before[-1:]) <= set(while_broken)
    told = left == 0 or ("fix:" in said and left == STORAGE_FAILED and seed % 2 == 0)
    return {
        "fault": f"disk-{kind}",
        "trial": seed,
        "supervised": seed % 2 == 1,
        "broken_seconds": round(healed - broken, 2),
        "left_with": left,
        "intact": intact,
        "told": told,
        "leftovers": leftovers,
        "exact": not differs,
        "ok": intact and told and not leftovers and not differs,
    }
