"""Faults of a hostile bucket and API on real hosts: sshd, startup script, agents and a real training.

    python bench/cloud_host_faults.py 6               # trials; about three minutes each on two idle cores
    python bench/cloud_host_faults.py 1 --seed 3005   # one trial again

`forerun run` rents a slice of the fake cloud of tests/cloud, whose hosts are namespaces of this machine. The bucket is
an emulator of Cloud Storage. Files of the record are damaged, forged, deleted or late, the bucket hangs, and the API
refuses calls or gives malformed answers. In trials with an odd seed, training never ends, the laptop is gone, and
forged files claim that the run may continue for years: the hosts must delete their slice within the cap. It needs root.
It writes bench/results/cloud_host_faults.json and cloud_host_faults.md, and exits with code 1 if a trial fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cloud"))

from fake import Fault
from fake.faults import MALFORMED
from fake.record_faults import KINDS as RECORD_KINDS
from fake.record_faults import RecordFaults
from hosts.site import Command, Site, cloud_site

from forerun.storage.open_folder import folder_at

RESULTS = Path(__file__).resolve().parent / "results"
NAME, SLICE, ZONE = "hostile", "v6e-8", "us-central1-b"
USD_PER_HOUR = 8 * 0.6518
STEPS, STEP_SECONDS = 30, 1.5
SHORT_SECONDS = 330.0  # of the cap in trials in which training never ends
LONGEST_SECONDS = 420.0  # of a trial
MINUTE = 60.0
API_KINDS = ("malformed", "401", "403", "429", "500")
PASSING_KINDS = ("malformed", "429", "500")  # a refusal of the permission may end the command before it rents
KINDS = (*(kind for kind in RECORD_KINDS if kind != "denied"), *API_KINDS, "laptop")
ENDING_KINDS = {"forged end", "forged finish", "forged host"}  # a run that ends early meets no other faults
JOB = f"""\
name: {NAME}
model: {{layers: 1, embed: 16, heads: 2}}
data: text
sequence: 16
batch: 8
steps: {STEPS}
device: cpu
precision: {{compute: float32}}
remat: none
checkpoint: {{every: 3, folder: "gs://checkpoints/runs"}}
sample: {{tokens: 0}}
"""


@dataclass
class HostTrial:
    """What happened in a trial. `problems` is empty if it passed."""

    seed: int
    never_ends: bool
    hosts_alone: bool = False
    cap_usd: float = 0.0
    usd: float = 0.0
    over_seconds: float = 0.0  # what the run cost above its cap, as seconds of its machine
    faults: list[tuple[float, str]] = field(default_factory=list)
    end: str = ""
    attempts: int = 0
    newest_checkpoint: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class EmulatorBucket:
    """The emulator of Cloud Storage. A stopped process does not answer, but accepts connections."""

    def __init__(self, folder: Path) -> None:
        self.is_hanging = False
        self.pid = next(pid for pid in processes() if is_emulator(pid, folder))

    def deny(self) -> None:
        self.hang()

    def hang(self) -> None:
        self.is_hanging = True
        os.kill(self.pid, signal.SIGSTOP)

    def work(self) -> None:
        self.is_hanging = False
        os.kill(self.pid, signal.SIGCONT)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def is_emulator(pid: int, folder: Path) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(folder).encode() in arguments and any(argument.endswith(b"gcs_server.py") for argument in arguments)


class HostTrialRunner:
    def __init__(self, seed: int, site: Site, never_ends: bool) -> None:
        self.random, self.site = random.Random(seed), site
        self.result = HostTrial(seed, never_ends)
        self.began = time.monotonic()
        self.is_listed, self.hangs_until = False, 0.0

    def run(self) -> HostTrial:
        site, result = self.site, self.result
        (site.laptop / "text").mkdir()
        (site.laptop / "text" / "tale.txt").write_text("It was the best of times. " * 200)
        (site.laptop / "job.yaml").write_text(JOB)
        brake = {"first": 1, "last": 1 << 40, "step_seconds": 3600.0 if result.never_ends else STEP_SECONDS}
        if result.never_ends:
            brake["first"] = 5
        (site.shared / "brake.json").write_text(json.dumps(brake))
        os.environ.update({name: site.environment[name] for name in site.environment if "STORAGE" in name})
        os.environ |= {
            name: site.environment[name] for name in ("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING")
        }
        self.bucket = EmulatorBucket(site.folder / "bucket")
        self.record = RecordFaults(folder_at(f"gs://checkpoints/runs/{NAME}/cloud"), self.bucket, self.random)
        result.cap_usd = round(USD_PER_HOUR * SHORT_SECONDS / 3600, 2) if result.never_ends else 20.0
        try:
            self._follow()
            self._clean_up()
        finally:
            self.record.end_all()
        self._check()
        result.seconds = round(time.monotonic() - self.began, 1)
        return result

    def _follow(self) -> None:
        """Run the command again whenever it ends with an error, as a user does, until the run has ended."""
        options = ["--on", SLICE, "--spot", "--zones", ZONE, "--max-usd", str(self.result.cap_usd), "--yes"]
        while True:
            with self.site.started("run", "job.yaml", *options) as run:
                state = self._follow_command(run)
            self.result.end = f"{state}: {run.output.strip().splitlines()[-1][:200] if run.output.strip() else ''}"
            if state in ("exit code 0", "too late", "deleted"):
                return
            if time.monotonic() - self.began > LONGEST_SECONDS:
                return
            self._wait(5.0)

    def _follow_command(self, run: Command) -> str:
        next_fault = time.monotonic() + self.random.uniform(5, 20)
        while time.monotonic() - self.began < LONGEST_SECONDS:
            self._look()
            if run.process.poll() is not None:
                return f"exit code {run.process.returncode}"
            if self.result.never_ends and self._trains():
                self.result.hosts_alone = True
                run.process.kill()  # the laptop is gone for good
                return self._without_laptop()
            most = 3 if self.result.never_ends else 8  # of failing calls, or the slice would come too late
            if len(self.result.faults) < most and time.monotonic() >= next_fault:
                next_fault = time.monotonic() + self.random.expovariate(1 / 10.0)
                kind = self.random.choice(KINDS)
                if self.result.never_ends:  # its hosts must train before the record is forged
                    kind = self.random.choice(PASSING_KINDS)
                if kind not in ENDING_KINDS or len(self.result.faults) >= 4:
                    self._inject(kind, run)
            time.sleep(0.3)
        return "too late"

    def _without_laptop(self) -> str:
        self._inject("prolonged", None)
        self._wait(self.random.uniform(5, 30))
        self._inject(self.random.choice(("hangs", "deleted", "damaged")), None)
        while time.monotonic() - self.began < LONGEST_SECONDS:
            self._wait(1.0)
            if not any(rental["ready_at"] and rental["ended_at"] is None for rental in self.site.cloud.rentals()):
                return "deleted"
        return "too late"

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()
            time.sleep(0.3)

    def _look(self) -> None:
        if self.bucket.is_hanging and time.monotonic() >= self.hangs_until:
            self.bucket.work()
        if not self.bucket.is_hanging:  # else the faults would wait, too
            self.record.end_due(self.site.cloud.now())
        checkpoints = self._checkpoints()
        if max(checkpoints, default=0) < self.result.newest_checkpoint:
            self.result.problems.append(f"checkpoint {self.result.newest_checkpoint} is lost")
        self.result.newest_checkpoint = max(checkpoints, default=0)

    def _checkpoints(self) -> set[int]:
        """Return the numbers of the checkpoints that are complete in the bucket."""
        folder = f"runs/{NAME}/commits/"
        return {int(Path(name).stem) for name in self.site.object_names() if name.startswith(folder)}

    def _trains(self) -> bool:
        """Return whether the training has saved a checkpoint."""
        return self.result.newest_checkpoint > 0

    def _inject(self, kind: str, run: Command | None) -> bool:
        is_injected = True
        if self.bucket.is_hanging and kind in RECORD_KINDS:
            return False
        if kind == "hangs":
            self.hangs_until = time.monotonic() + self.random.uniform(5, 60)
            self.bucket.hang()
        elif kind == "prolonged":
            self.record.prolong(self.site.cloud.now())
        elif kind in RECORD_KINDS:
            is_injected = self.record.inject(kind, self.site.cloud.now())
        elif kind == "laptop":
            assert run is not None
            run.process.kill()
        else:
            fault = Fault("error", http=int(kind)) if kind.isdigit() else Fault("malformed")
            fault.body = self.random.choice(sorted(MALFORMED)) if kind == "malformed" else ""
            fault.count, fault.method = self.random.choice((1, 3, 8)), self.random.choice(("", "", "POST", "GET"))
            self.site.cloud.inject(fault)
        if is_injected:
            self.result.faults.append((round(time.monotonic() - self.began, 1), kind))
            if kind in RECORD_KINDS and not self.is_listed and self._trains():
                self.is_listed = True
                self._list(f"during the fault {kind!r}")
        return is_injected

    def _list(self, when: str) -> None:
        existing = {resource["name"] for resource in self.site.cloud.resources()}
        listed = self.site.forerun("ps", "--all", "--json")
        missing = existing & {resource["name"] for resource in self.site.cloud.resources()}
        missing = {name for name in missing if name not in listed.stdout}
        if listed.returncode != 0 or missing:
            self.result.problems.append(f"forerun ps {when} does not list {sorted(missing)}: {listed.stderr[-300:]}")

    def _clean_up(self) -> None:
        self.site.cloud.clear_faults()
        if self.random.random() < 0.5:
            self.bucket.hang()
        self._list("at the end")
        deletion = self.site.forerun("down", "--all", "--yes")
        if deletion.returncode != 0:
            self.result.problems.append(f"forerun down: exit code {deletion.returncode}: {deletion.stderr[-500:]}")
        remaining = [resource["name"] for resource in self.site.cloud.resources()]
        if remaining:
            self.result.problems.append(f"leaked: {remaining}")

    def _check(self) -> None:
        result, rentals = self.result, self.site.cloud.rentals()
        result.usd = sum(rental["usd"] for rental in rentals)
        result.attempts = len({rental["name"] for rental in rentals})
        prices = [rental["usd_per_hour"] for rental in rentals]
        if prices:
            result.over_seconds = round(max(0.0, result.usd - result.cap_usd) / min(prices) * 3600, 1)
            if result.usd > result.cap_usd + max(prices) * MINUTE / 3600:
                result.problems.append(f"cost ${result.usd:.4f} with a cap of ${result.cap_usd:.4f}")
        self._look()
        if any(rental["ready_at"] and rental["ended_at"] is None for rental in rentals):
            result.problems.append("machines still run")


def one_trial(seed: int, keep: str) -> HostTrial:
    with (
        tempfile.TemporaryDirectory(prefix=f"cloud-hosts-{seed}-") as folder,
        cloud_site(Path(folder) / "site", speed=1.0) as site,
    ):
        result = HostTrialRunner(seed, site, never_ends=seed % 2 == 1).run()
        if keep:
            Path(keep).mkdir(parents=True, exist_ok=True)
            logs = [path.read_text(errors="replace") for path in sorted(site.folder.glob("run-*.log"))]
            Path(keep, f"{seed}.log").write_text("\n".join([*logs, site.logs()]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trials", type=int)
    parser.add_argument("--seed", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", default="", help="a folder for the logs of the trials")
    parser.add_argument("--no-results", action="store_true", help="do not write bench/results")
    args = parser.parse_args()
    results = []
    seeds = range(args.seed, args.seed + args.trials)
    # The environment of a process has the address of one bucket.
    with ProcessPoolExecutor(args.workers, get_context("fork")) as pool:
        for result in pool.map(partial(one_trial, keep=args.keep), seeds):
            results.append(result)
            show(result)
    if not args.no_results:
        record(results)
    sys.exit(1 if any(trial.problems for trial in results) else 0)


def show(result: HostTrial) -> None:
    cost = f"${result.usd:.3f} of ${result.cap_usd:.2f}"
    kinds = " ".join(kind for _, kind in result.faults)
    print(f"{result.seed}: {result.end} | {cost} | checkpoint {result.newest_checkpoint} | {kinds}", flush=True)
    for problem in result.problems:
        print(f"    PROBLEM {problem}", flush=True)


def record(new_results: list[HostTrial]) -> None:
    """Write the results. A trial replaces that of the same seed."""
    file = RESULTS / "cloud_host_faults.json"
    stored = [HostTrial(**values) for values in json.loads(file.read_text("utf-8"))] if file.exists() else []
    by_seed = {trial.seed: trial for trial in (*stored, *new_results)}
    results = [trial for _, trial in sorted(by_seed.items())]
    file.write_text(json.dumps([asdict(trial) for trial in results], indent=1, sort_keys=True) + "\n", "utf-8")
    counts = Counter(kind for trial in results for _, kind in trial.faults)
    problems = [f"Seed {trial.seed}: {'; '.join(trial.problems)}" for trial in results if trial.problems]
    lines = [
        "# Faults of a hostile bucket and API on real hosts",
        "",
        "Written by `bench/cloud_host_faults.py`, which describes the trials.",
        "",
        f"{counts.total()} faults in {len(results)} runs; {len(problems)} runs with a problem. In "
        f"{sum(trial.hosts_alone for trial in results)} runs, the hosts were alone with forged files.",
        "",
        "| seed | hosts alone | end | USD | cap | seconds above the cap | newest checkpoint |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {trial.seed} | {'yes' if trial.hosts_alone else 'no'} | {trial.end.split(':')[0]} | {trial.usd:.3f} "
            f"| {trial.cap_usd:.2f} | {trial.over_seconds:.0f} | {trial.newest_checkpoint} |"
            for trial in results
        ),
        "",
        "| fault | injected |",
        "| --- | --- |",
        *(f"| {kind} | {counts[kind]} |" for kind in (*KINDS, "prolonged")),
        "",
        *(f"{text}\n" for text in problems),
    ]
    (RESULTS / "cloud_host_faults.md").write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    main()
