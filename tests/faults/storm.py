"""Faults of all kinds, one after the other, against one supervised run: `python tests/faults/storm.py --minutes 20`.

Every 20 to 60 seconds one of: SIGKILL of the worker or of its supervisor, SIGSTOP (nobody continues it), a freeze of
both for some seconds, SIGTERM to either, a full disk for some seconds (needs root, for a tmpfs), a damaged newest
checkpoint and a kill. What a scheduler does is done here too: a supervisor that left is started again, at once. At the
end the run must be EXACT (`runs.py`). One JSON line per fault, and a last one with the goodput:

    goodput = steps x median step seconds / wall seconds
    best    = 1 / (1 + save / interval) - lost / wall seconds
    lost    = (faults + 1) x restart + faults x interval / 2 + stuck x limit + seconds of freezing

with `save` the seconds that a save costs the steps, `interval` = sqrt(2 x save x mean time between faults), the optimum
of Young and Daly, `restart` the median seconds from a start to a new step without what is done again, and `limit` the
ten seconds after which a silent worker counts as stuck. All are measured in this very run; the step is the median of
the run's own, so that a loaded machine counts alike on both sides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hosts_job import reserved_port
from runs import DEVICES, Bench, Run

from forerun.supervise.protocol.limits import Limits

EVERY = 25
DISK_BYTES = 300 << 20
USEFUL = 0.7  # of the time, roughly: what the number of steps is chosen by
PASSING, PASSES_SECONDS = ("freeze", "fill"), 4.0
PRIVATE = ("unix_seconds", "run", "worker")
JOB = """\
model: {{layers: 2, embed: 192, heads: 4}}
data: {{path: text, ledger: true}}
sequence: 64
batch: 8
steps: {steps}
device: cpu
optimizer: {{lr: 1e-3}}
precision: {{compute: float32}}
checkpoint: {{every: {every}, keep: 3}}
sample: {{tokens: 0}}
"""


class Storm:
    """One run on one or several hosts, its supervisors kept alive, and the faults that come into it."""

    def __init__(self, bench: Bench, name: str, hosts: int, disk: bool) -> None:
        self.bench, self.hosts = bench, hosts
        self.runs = [bench.run(name) for _ in range(hosts)]
        for index, run in enumerate(self.runs[1:], 1):
            run.log_file = run.log_file.with_suffix(f".{index}.log")
        self.words: list[list[str]] = [[] for _ in self.runs]
        self.devices = DEVICES if hosts == 1 else 1
        if hosts > 1:
            secret = bench.folder / "secret"
            secret.write_text(secrets.token_hex(16))
            secret.chmod(0o600)
            self.reserved = reserved_port("127.0.0.1")
            common = ["--leader", f"127.0.0.1:{self.reserved.getsockname()[1]}", "--secret", str(secret)]
            self.words = [[*common, "--host", f"{index}/{hosts}"] for index in range(hosts)]
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.codes: Counter[int] = Counter()
        self.kinds: tuple[Callable[[Run], None], ...] = (self.kill, self.kill_supervisor, self.stop, self.freeze)
        self.kinds += (self.terminate, self.terminate_worker, self.damage)
        self.kinds += (self.fill,) if disk else ()

    @property
    def run(self) -> Run:
        return self.runs[0]

    def start(self, run: Run) -> None:
        run.start(*self.words[self.runs.index(run)], supervise=True, devices=self.devices)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self.due.append((time.time() + seconds, act))

    def tend(self) -> bool:
        """What is due, and what a scheduler would do; False when the run has come to its end."""
        now = time.time()
        ready, self.due = [d for d in self.due if d[0] <= now], [d for d in self.due if d[0] > now]
        for _, act in ready:
            act()
        if all(run.over and run.process.returncode == 0 for run in self.runs):
            return False
        for run in self.runs:
            if run.over and run.process.returncode != 0:
                self.codes[run.process.returncode] += 1
                assert sum(self.codes.values()) < 2000, f"it does not get anywhere\n{run.said()[-3000:]}"
                self.start(run)
        return True

    # The faults

    def kill(self, run: Run) -> None:
        run.kill(run.worker())

    def kill_supervisor(self, run: Run) -> None:
        run.kill(run.process.pid)

    def stop(self, run: Run) -> None:
        run.kill(run.worker(), signal.SIGSTOP)

    def freeze(self, run: Run) -> None:
        pids = [pid for pid in (run.process.pid, run.worker()) if pid is not None]
        for pid in pids:
            run.kill(pid, signal.SIGSTOP)
        self.later(PASSES_SECONDS, lambda: [run.kill(pid, signal.SIGCONT) for pid in pids] and None)

    def terminate(self, run: Run) -> None:
        run.kill(run.process.pid, signal.SIGTERM)

    def terminate_worker(self, run: Run) -> None:
        run.kill(run.worker(), signal.SIGTERM)

    def damage(self, run: Run) -> None:
        """One flipped bit in a file of the newest checkpoint, then a kill, so that it is looked at."""
        commits = run.commits()
        for commit in commits[-1:]:
            with suppress(FileNotFoundError):
                file = run.checkpoints / commit.folder / max(commit.files, key=lambda name: commit.files[name][0])
                raw = bytearray(file.read_bytes())
                raw[len(raw) // 2] ^= 1
                file.write_bytes(raw)
        run.kill(run.worker())

    def fill(self, run: Run) -> None:
        ballast = self.bench.folder / "runs" / "ballast"
        free = shutil.disk_usage(ballast.parent).free
        with suppress(OSError), ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(4096, free - (1 << 20)))
        self.later(PASSES_SECONDS, lambda: ballast.unlink(missing_ok=True))


def storm(bench: Bench, name: str, hosts: int, between: tuple[float, float], seed: int, disk: bool) -> dict[str, Any]:
    chance = random.Random(seed)
    field = Storm(bench, name, hosts, disk)
    events: list[dict[str, Any]] = []
    order: list[Callable[[Run], None]] = []
    began = time.time()
    try:
        for run in field.runs:
            field.start(run)
        following = began + chance.uniform(*between)
        while field.tend():
            step = field.run.last_step()
            if events and "recovery_seconds" not in events[-1] and has_recovered(events[-1], step):
                newest = events[-1]
                newest["recovery_seconds"] = round(time.time() - newest["unix_seconds"], 2)
                print(json.dumps({key: newest[key] for key in newest if key not in PRIVATE}), flush=True)
            if time.time() >= following:
                order = order or chance.sample(field.kinds, len(field.kinds))
                fault, run = order.pop(), chance.choice(field.runs)
                committed = field.run.newest()
                event = {"event": len(events), "kind": fault.__name__, "host": field.runs.index(run)}
                event |= {
                    "at_seconds": round(time.time() - began, 1),
                    "step": step,
                    "uncommitted_steps": step - committed,
                }
                events.append({**event, "unix_seconds": time.time(), "run": run, "worker": run.worker()})
                fault(run)
                following = time.time() + chance.uniform(*between)
            time.sleep(0.02)
        wall = time.time() - began
        for _, act in field.due:
            act()
        return {**figures(field, events, wall), "outcome": field.run.outcome()}
    finally:
        for run in field.runs:
            run.__exit__(None, None, None)


def has_recovered(event: dict[str, Any], step: int) -> bool:
    """A step that is new since the worker that was hit was gone, or since a fault that passes had passed."""
    passed = time.time() - event["unix_seconds"] > PASSES_SECONDS
    ended = event["run"].worker() not in (None, event["worker"])
    if not (passed if event["kind"] in PASSING else ended):
        event["step"] = max(event["step"], step)
    return bool((passed if event["kind"] in PASSING else ended) and step > event["step"])


def figures(field: Storm, events: list[dict[str, Any]], wall: float) -> dict[str, Any]:
    rows = field.run.metrics()
    seconds = [row["step_seconds"] for row in rows]
    step = statistics.median(seconds)
    every = field.bench.every
    saving = [row["step_seconds"] for row in rows if row["step"] % every in (0, 1)]
    save = max(2 * (statistics.fmean(saving) - step), 1e-4)
    ended = [event for event in events if event["kind"] not in PASSING]
    recoveries = [event["recovery_seconds"] for event in ended if "recovery_seconds" in event]
    again = [event["uncommitted_steps"] * step for event in ended]
    restart = max(0.0, statistics.median(recoveries) - statistics.fmean(again)) if recoveries else 0.0
    stuck = sum(event["kind"] == "stop" for event in events)
    limit = Limits().stall * Limits().stall_floor
    interval = math.sqrt(2 * save * wall / max(1, len(ended)))
    frozen = sum(event["kind"] == "freeze" for event in events) * PASSES_SECONDS
    lost = (len(ended) + 1) * restart + len(ended) * interval / 2 + stuck * limit + frozen
    best = 1 / (1 + save / interval) - lost / wall
    goodput = len(rows) * step / wall
    return {
        "hosts": field.hosts,
        "faults": dict(Counter(event["kind"] for event in events)),
        "codes": {str(code): count for code, count in field.codes.items()},
        "steps": len(rows),
        "step_seconds": round(step, 4),
        "save_seconds": round(save, 4),
        "restart_seconds": round(restart, 2),
        "worst_recovery_seconds": max(recoveries, default=None),
        "wall_seconds": round(wall, 1),
        "goodput": round(goodput, 4),
        "best_goodput": round(best, 4),
        "of_best": round(goodput / best, 4) if best > 0 else None,
    }


def step_seconds(folder: Path, hosts: int) -> float:
    """Of a short run once it is warm, to choose the number of steps by."""
    bench = Bench(folder, steps=8 * EVERY, every=EVERY, job=JOB)
    with bench.run("pace") as run:
        run.start(devices=DEVICES if hosts == 1 else 1)
        run.finish()
        return statistics.median(row["step_seconds"] for row in run.metrics()[4 * EVERY :])


def mounted(folder: Path) -> bool:
    """A disk of its own for the runs, small enough to fill."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main() -> int:
    words = argparse.ArgumentParser(description="faults of all kinds against one supervised run")
    words.add_argument("--minutes", type=float, default=20)
    words.add_argument("--hosts", type=int, default=1)
    words.add_argument("--between", type=float, nargs=2, default=(20, 60), metavar="SECONDS")
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no run and no disk behind
    with tempfile.TemporaryDirectory() as name:
        pace = step_seconds(Path(name, "pace"), given.hosts)
        steps = max(2 * EVERY, int(given.minutes * 60 * USEFUL / pace))
        bench = Bench(Path(name, "bench"), steps=steps, every=EVERY, job=JOB)
        shutil.copytree(Path(name, "pace", "cache"), bench.folder / "cache")
        disk = mounted(bench.folder / "runs")
        try:
            found = storm(bench, "storm", given.hosts, tuple(given.between), given.seed, disk)
            calm = storm(bench, "calm", given.hosts, (math.inf, math.inf), given.seed, disk)
            different = found.pop("outcome").differs_in(calm["outcome"])
        finally:
            if disk:
                subprocess.run(["umount", "--lazy", str(bench.folder / "runs")], check=True)
        line = {"fault": "storm", "trial": 0, "seed": given.seed, **found, "differs": different}
        print(json.dumps({**line, "exact": not different, "ok": not different}), flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
