"""Faults of hosts, on real processes: `python tests/faults/hosts_rig.py FAULT TRIALS [KIND] [HOSTS]`.

One JSON line per trial: seconds from the fault until the leader knew of it and until the next new step, whether the
culprit was named rightly, and whether every step's value equals the run without a fault. Seeds are the trial's number.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hosts_job import HostsJob, gone

STEPS = {"jax": 400, "barrier": 200}
SAVE_EVERY = 10


def kill_worker(job: HostsJob, host: int) -> None:
    os.kill(job.pid(host), signal.SIGKILL)


def stop_worker(job: HostsJob, host: int) -> None:
    os.kill(job.pid(host), signal.SIGSTOP)


def kill_host(job: HostsJob, host: int) -> None:
    """Supervisor and worker; the supervisor comes back after a second, as a scheduler would have it."""
    job.supervisors[host].kill()
    job.supervisors[host].wait()
    assert gone(job.pid(host)), "the worker outlived its supervisor"
    time.sleep(1)
    job.start(host)


def freeze_host(job: HostsJob, host: int) -> None:
    """Supervisor and worker stand still for ten seconds, then go on as if nothing had been."""
    worker = job.pid(host)
    job.supervisors[host].send_signal(signal.SIGSTOP)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(10)
    os.kill(worker, signal.SIGCONT)
    job.supervisors[host].send_signal(signal.SIGCONT)


def terminate(job: HostsJob, host: int) -> None:
    job.supervisors[host].send_signal(signal.SIGTERM)


def terminate_worker(job: HostsJob, host: int) -> None:
    os.kill(job.pid(host), signal.SIGTERM)


FAULTS: dict[str, Callable[[HostsJob, int], None] | None] = {
    "kill": kill_worker,
    "kill-coordinator": kill_worker,
    "stop": stop_worker,
    "sleep": None,
    "loop": None,
    "kill-host": kill_host,
    "kill-leader": kill_host,
    "freeze-host": freeze_host,
    "sigterm": terminate,
    "sigterm-worker": terminate_worker,
}
FIRST_ONLY = ("kill-coordinator", "kill-leader")
ANNOUNCED = ("sigterm", "sigterm-worker")


def reference(kind: str, hosts: int) -> dict[int, str]:
    with tempfile.TemporaryDirectory() as folder, new_job(Path(folder), kind, hosts) as job:
        codes = job.start_all().wait()
        assert codes == [0] * hosts, job.said()
        return job.values()


def new_job(folder: Path, kind: str, hosts: int, fault: str = "") -> HostsJob:
    return HostsJob(folder, hosts, kind=kind, steps=STEPS[kind], every=SAVE_EVERY, fault=fault)


@contextmanager
def begun(fault: str, folder: Path, kind: str, hosts: int, seed: int) -> Iterator[tuple[HostsJob, int, float]]:
    """A job into which the fault has come: the job, the host, and when."""
    chance = random.Random(f"{fault} {seed}")
    host = 0 if fault in FIRST_ONLY else chance.randrange(0 if "host" not in fault else 1, hosts)
    step = chance.randrange(SAVE_EVERY + 5, STEPS[kind] // 2)
    act = FAULTS[fault]
    with new_job(folder, kind, hosts, "" if act else f"{fault}:{host}:{step}") as job:
        job.start_all()
        if act is None:
            since = float(job.until("asleep", host)["unix_seconds"])
        else:
            job.until("step", host, step=step)
            since = time.time()
            act(job, host)
        yield job, host, since


def trial(fault: str, kind: str, hosts: int, seed: int, expected: dict[int, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, begun(fault, Path(folder), kind, hosts, seed) as (job, host, since):
        about: dict[str, Any] = {"fault": fault, "trial": seed, "kind": kind, "hosts": hosts, "host": host}
        codes = job.wait(150)
        if fault in ANNOUNCED:
            stops = job.notes("stopped")
            about["codes"], about["steps"] = codes, sorted({note["step"] for note in stops})
            about["stop_seconds"] = round(max(note["unix_seconds"] for note in stops) - since, 2)
            about["ok"] = codes == [75] * hosts and len(stops) == hosts and len(about["steps"]) == 1
            saved = json.loads((Path(folder) / "saved").read_text())[0]
            return {**about, "saved": saved == about["steps"][0]}
        before = max(note["step"] for note in job.notes("step") if note["unix_seconds"] <= since)
        kinds = ("death", "stall", "fault", "start")
        known = [line["unix_seconds"] for kind in kinds for line in job.log(kind) if line["unix_seconds"] > since]
        new = [note["unix_seconds"] for note in job.notes("step") if note["step"] > before and note["attempt"] > 1]
        told = [line.get("text", "") for line in (*job.log("cause"), *job.log("fault"))]
        named = next((re.search(r"host (\d+)", text) for text in told if text), None)
        return {
            **about,
            "detect_seconds": round(min(known) - since, 2),
            "recover_seconds": round(min(new) - since, 2),
            "culprit": int(named[1]) if named else None,
            "culprit_right": named is not None and int(named[1]) == host,
            "exact": codes == [0] * hosts and job.values() == expected,
            "told": told[0].splitlines()[0] if told else "",
        }


if __name__ == "__main__":
    name, trials, kind, hosts = (*sys.argv[1:], *("", "", "barrier", "4")[len(sys.argv) - 1 :])
    expected = reference(kind, int(hosts)) if name not in ANNOUNCED else {}
    for seed in range(int(trials)):
        print(json.dumps(trial(name, kind, int(hosts), seed, expected)), flush=True)
