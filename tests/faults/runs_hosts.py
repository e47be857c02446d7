"""Faults of hosts, in real runs: `python tests/faults/runs_hosts.py FAULT TRIALS [HOSTS]`.

Every host is `forerun train job.yaml --host I/N --leader ... --secret ...` with one device, all on this machine. FAULT:

    kill              SIGKILL to the worker of a random host
    kill-coordinator  SIGKILL to the worker of host 0, in which jax's coordinator lives
    kill-host         SIGKILL to supervisor and worker of a random host; the supervisor is started again after a second
    stop              SIGSTOP to the worker of a random host: alive, but stuck
    sigterm           SIGTERM to the supervisor of a random host
    resize            one run by 4 -> 2 -> 1 -> 8 hosts (TRIALS and HOSTS do not count)

One JSON line per trial: seconds from the fault until the leader knew of it and until the next new step, whether the
culprit was named rightly, and whether losses, final state and ledger are those of the undisturbed run. The seed is the
trial's number.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["JAX_PLATFORMS"] = "cpu"

from hosts_job import end, reserved_port, whole_lines
from runs import JOB, Bench, Outcome, Run, children

HOSTS, STEPS, EVERY, CHAIN = 4, 120, 5, 5
STOPPED = 75
RESIZES = (4, 2, 1, 8)
RESIZE_STEPS = 64
GENTLE = JOB.replace("lr: 1e-2", "lr: 3e-4")  # at the higher rate two meshes drift apart by 1e-3, in one process too
TOLERANCE = 1e-5


class HostsRun:
    """One run by several hosts of this machine. `apart`: each has tokens and caches of its own.

    `words` are overrides of the job, and `environment` is added to that of the bench.
    """

    def __init__(
        self,
        bench: Bench,
        name: str,
        hosts: int,
        *words: str,
        apart: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.run, self.hosts, self.apart = Run(bench, name), hosts, apart
        self.words, self.environment = words, environment or {}
        self._reserved = reserved_port("127.0.0.1")
        self.port = int(self._reserved.getsockname()[1])
        self.secret = bench.folder / "secret"
        if not self.secret.exists():
            self.secret.write_text(secrets.token_hex(16))
            self.secret.chmod(0o600)
        self.supervisors: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        bench = self.run.bench
        words = [sys.executable, "-m", "forerun", "train", "job.yaml", f"name={self.run.name}"]
        words += self.words
        words += ["--host", f"{index}/{self.hosts}", "--leader", f"127.0.0.1:{self.port}", "--secret", "secret"]
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        if self.apart:
            flags["XDG_CACHE_HOME"] = str(self.cache(index))
        with self.said_file(index).open("ab") as log:
            self.supervisors[index] = subprocess.Popen(
                words, cwd=bench.folder, env={**bench.environment, **flags, **self.environment}, stdout=log, stderr=log
            )

    def start_all(self) -> Self:
        for index in range(self.hosts):
            self.start(index)
        return self

    def cache(self, index: int) -> Path:
        """Of a host that has one of its own."""
        return self.run.bench.folder / f"cache-{index}"

    def said_file(self, index: int) -> Path:
        return self.run.bench.folder / f"{self.run.name}.host-{index}.log"

    def said(self) -> str:
        return "\n".join(self.said_file(index).read_text(errors="replace") for index in sorted(self.supervisors))

    def worker(self, index: int) -> int:
        """Between two attempts there is none, for a moment."""
        pid = self.supervisors[index].pid
        self.until(lambda: bool(children(pid)), f"worker of host {index}")
        return children(pid)[0]

    def log(self, *kinds: str) -> list[dict[str, Any]]:
        """What the leader wrote down."""
        return [line for line in whole_lines(self.run.folder / "supervise" / "log.jsonl") if line["kind"] in kinds]

    def until_step(self, step: int, seconds: float = 600) -> float:
        """When the figures of that step, or of a later one, were there."""
        return self.until(lambda: self.run.last_step() >= step, f"step {step}", seconds)

    def until(self, come: Callable[[], bool], what: str, seconds: float = 600) -> float:
        """When it had come; all supervisors must be there until then."""
        deadline = time.monotonic() + seconds
        while not come():
            left = {index: child.poll() for index, child in self.supervisors.items() if child.poll() is not None}
            assert not left or come(), f"no {what}, supervisors have left: {left}\n{self.said()}"
            assert time.monotonic() < deadline, f"no {what} in {seconds} s\n{self.said()}"
            time.sleep(0.01)
        return time.time()

    def wait(self, seconds: float = 600) -> list[int]:
        """Exit codes, in the order of the hosts."""
        deadline = time.monotonic() + seconds
        try:
            return [self.supervisors[i].wait(max(0.1, deadline - time.monotonic())) for i in sorted(self.supervisors)]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {seconds} s\n{self.said()}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end(self.supervisors.values())
        self._reserved.close()


def reference(bench: Bench, hosts: int) -> Outcome:
    with HostsRun(bench, f"reference-{hosts}", hosts) as job:
        assert job.start_all().wait() == [0] * hosts, job.said()
        return job.run.outcome()


def strike(fault: str, job: HostsRun, host: int) -> float:
    """The fault, and when it came."""
    since = time.time()
    if fault in ("kill", "kill-coordinator"):
        os.kill(job.worker(host), signal.SIGKILL)
    elif fault == "stop":
        os.kill(job.worker(host), signal.SIGSTOP)
    elif fault == "sigterm":
        job.supervisors[host].send_signal(signal.SIGTERM)
    elif fault == "kill-host":
        job.supervisors[host].kill()
        job.supervisors[host].wait()
        time.sleep(1)
        job.start(host)
    else:
        raise SystemExit(f"no such fault: {fault}\n{__doc__}")
    return since


def chain(bench: Bench, fault: str, hosts: int, seeds: range, expected: Outcome) -> list[dict[str, Any]]:
    """One run that the fault strikes once for every seed; whether it is EXACT is judged at its end, for all of them."""
    lines = []
    with HostsRun(bench, f"{fault}-{seeds[0]}", hosts) as job:
        job.start_all()
        for seed in seeds:
            chance = random.Random(f"{fault} {seed}")
            host = 0 if fault == "kill-coordinator" else chance.randrange(hosts)
            job.until_step(max(EVERY, job.run.last_step()) + chance.randrange(2, 12))
            about = {"fault": f"hosts {fault}", "trial": seed, "seed": seed, "hosts": hosts, "host": host}
            lines.append({**about, **(announced if fault == "sigterm" else struck)(job, fault, host)})
        codes = job.wait()
        differs = expected.differs_in(job.run.outcome())
    exact = codes == [0] * hosts and not differs
    why = {} if exact else {"differs": differs, "codes": codes}
    return [{**line, "exact": exact, "ok": line["ok"] and exact, **why} for line in lines]


def struck(job: HostsRun, fault: str, host: int) -> dict[str, Any]:
    """A fault that nobody announced."""
    before, lines, starts = job.run.last_step(), len(job.log("cause", "fault")), len(job.log("start"))
    since = strike(fault, job, host)
    job.until(lambda: len(job.log("start")) > starts, "new attempt")
    before = max(before, job.run.last_step())  # steps that were made until the fault came are not new
    new = job.until_step(before + 1)
    known = [line["unix_seconds"] for line in job.log("death", "stall", "fault", "start")]
    told = [line.get("text", "") for line in job.log("cause", "fault")[lines:]]
    named = next((found for text in told if (found := re.search(r"host (\d+)", text))), None)
    culprit = named is not None and int(named[1]) == host
    return {
        "step": before,
        "detect_seconds": round(min(at for at in known if at > since) - since, 2),
        "recover_seconds": round(new - since, 2),
        "culprit_right": culprit,
        "ok": culprit or fault == "kill-host",  # a host that is gone is named by who it is, not by what it did
        "told": told[0].splitlines()[0] if told else "",
    }


def announced(job: HostsRun, fault: str, host: int) -> dict[str, Any]:
    """A stop with the usual grace; then all are started again."""
    since = strike(fault, job, host)
    codes = job.wait()
    seconds, at = round(time.time() - since, 2), job.run.last_step()
    ok = codes == [STOPPED] * job.hosts and job.run.newest() == at
    job.start_all()
    return {"stop_seconds": seconds, "stopped_at": at, "ok": ok}


def resize(bench: Bench, expected: Outcome) -> dict[str, Any]:
    """One run by ever other numbers of hosts. Sums come in another order then: losses agree to 1e-5, the ledger and
    what is restored agree to the bit."""
    stops = [RESIZE_STEPS * part // len(RESIZES) for part in range(1, len(RESIZES))]
    codes: list[list[int]] = []
    for number, hosts in enumerate(RESIZES):
        with HostsRun(bench, "resize", hosts) as job:
            job.start_all()
            if number < len(stops):
                job.until_step(stops[number])
                job.supervisors[hosts - 1].send_signal(signal.SIGTERM)
            codes.append(job.wait())
    found = job.run.outcome()
    pairs = [(float.fromhex(found.losses[step]), float.fromhex(loss)) for step, loss in expected.losses.items()]
    worst = max(abs(mine - theirs) / theirs for mine, theirs in pairs)
    wanted = [[STOPPED] * hosts for hosts in RESIZES[:-1]] + [[0] * RESIZES[-1]]
    return {
        "fault": "hosts resize",
        "trial": 0,
        "hosts": list(RESIZES),
        "codes_right": codes == wanted,
        "ledger_equal": found.ledger == expected.ledger,
        "loss_relative_difference": worst,
        "ok": codes == wanted and found.ledger == expected.ledger and worst <= TOLERANCE,
    }


def main(fault: str, trials: int, hosts: int = HOSTS) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if fault == "resize":
            bench = Bench(Path(folder), steps=RESIZE_STEPS, every=EVERY, job=GENTLE)
            print(json.dumps(resize(bench, reference(bench, hosts))), flush=True)
            return
        bench = Bench(Path(folder), steps=STEPS, every=EVERY)
        expected = reference(bench, hosts)
        for first in range(0, trials, CHAIN):
            for line in chain(bench, fault, hosts, range(first, min(trials, first + CHAIN)), expected):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
