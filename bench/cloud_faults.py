"""Random faults in cloud runs: nothing leaks, nothing costs more than the cap plus one minute, no checkpoint is lost.

    python bench/cloud_faults.py 200                        # until 200 faults are injected: 15 minutes on two cores
    python bench/cloud_faults.py 100 --provider compute     # slices of Compute Engine in place of the Cloud TPU API
    python bench/cloud_faults.py 1 --seed 1017 --workers 1  # one trial again
    python bench/cloud_faults.py 60 --hostile               # with damaged records and malformed answers

Each trial is one cloud run on the fake cloud of tests/cloud. The controllers (a laptop, and in half of the trials a
keeper), the provider, the record and the agents on the two hosts are those of forerun, as separate processes. The
trainer is a stub: its state is a chain of hashes, so that a lost or repeated step changes the result. Faults come at
random moments. At the end, `forerun ps` must list everything that exists, and `forerun down --all` must delete it.
With `--hostile`, files of the record are damaged, forged, deleted or late, the bucket denies or hangs, and the API
refuses calls or gives malformed answers. `forerun ps` and `forerun down` then also run during these faults. A record
may end such a run early. It may not prolong it.
The fake's clock is ten times as fast as this machine's, and all waits of forerun are that much shorter.
It writes bench/results/cloud_faults.json and cloud_faults.md, and exits with code 1 if a trial fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cloud"))

import google.auth.transport.requests  # noqa: F401
from fake import FakeCloud, Fault, record_faults
from fake.faults import MALFORMED
from fake.process_host import scale_waits, state_after, write
from fake.process_hosts import kill_host, kill_process
from fake.record_faults import LocalBucket, RecordFaults

from forerun.cloud.control.actions import Action
from forerun.cloud.control.begin import begin_run
from forerun.cloud.control.controller import Controller
from forerun.cloud.control.ledger import RunLedger
from forerun.cloud.control.run_view import ControlView
from forerun.cloud.google.clock import elapsed_seconds
from forerun.cloud.provider import CloudUnavailable, HostAddress
from forerun.cloud.providers import provider_named
from forerun.cloud.record.entries import AttemptEntry, CloudRun, LeaseEntry, Option
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.setup.bundle import agent_settings
from forerun.storage.folder import LocalFolder

RESULTS = Path(__file__).resolve().parent / "results"
SPEED = 10.0
ZONES = ("us-east5-a", "us-central1-a")
SLICE, HOSTS = "v5p-16", 2
USD_PER_HOUR = {"us-east5-a": 8 * 1.0588, "us-central1-a": 8 * 0.8136}
STEP_SECONDS, SAVE_EVERY, TOTAL_STEPS = 2.0, 15, 120
LONGEST_SECONDS = 4000.0  # of a trial, by the fake's clock
MINUTE = 60.0
API_KINDS = ("refuse", "429", "503", "lost", "duplicate", "slow")
HOSTILE_API_KINDS = ("malformed", "401", "403", "429", "500")
PROCESS_KINDS = ("laptop", "keeper", "host", "agent", "trainer")
CLOUD_KINDS = ("preempt", "notice", "capacity")
PROVIDERS = {"tpu": "queued resources of the Cloud TPU API", "compute": "instance groups of Compute Engine"}
KINDS = (*API_KINDS, *PROCESS_KINDS, *CLOUD_KINDS)
RECORD_KINDS = record_faults.KINDS
HOSTILE_KINDS = (*RECORD_KINDS, *HOSTILE_API_KINDS, "lost", *PROCESS_KINDS, "preempt")
# After these, a run may have ended before its training: a writer of the bucket may stop a run.
ENDING_KINDS = {"forged end", "forged finish", "forged host"}
NAMES = {
    "refuse": "API call refused (connection closed)",
    "429": "API answers 429",
    "503": "API answers 503",
    "lost": "API acts, its answer is lost",
    "duplicate": "API gets a request twice",
    "slow": "API answers late",
    "laptop": "SIGKILL of the controller on the laptop, started again after 5 to 200 s",
    "keeper": "SIGKILL of the second controller, started again after 5 to 200 s",
    "host": "SIGKILL of all processes of a host, for good",
    "agent": "SIGKILL of an agent",
    "trainer": "SIGKILL of a trainer",
    "preempt": "preemption without a notice",
    "notice": "preemption with a notice of 30 s",
    "capacity": "capacity of a zone changes",
    "malformed": "API acts, its answer is null, a list, HTML, truncated, empty or of wrong types",
    "401": "API answers 401",
    "403": "API answers 403",
    "500": "API answers 500",
    "damaged": "record: a file is garbage",
    "forged number": "record: NaN, 1e12, a string and other values in place of a number",
    "forged end": "record: the end of the attempt that runs",
    "forged lease": "record: a lease of another controller, up to 1e9 s",
    "forged cap": "record: another cap and other prices",
    "forged limit": "record: another limit of the attempt",
    "forged ready": "record: another start of billing",
    "forged host": "record: a report of a host",
    "forged finish": "record: the end of training",
    "deleted": "record: a file, or all of them, deleted",
    "late": "record: a file disappears and comes back after 5 to 60 s",
    "denied": "the bucket refuses every call for 5 to 60 s",
    "hangs": "the bucket does not answer reads of `run.json` for 5 to 60 s",
}


@dataclass
class TrialResult:
    """What happened in a trial. `problems` is empty if it passed."""

    seed: int
    keeper: bool
    cap_usd: float
    faults: list[tuple[float, str]] = field(default_factory=list)
    end: str = ""
    attempts: int = 0
    usd: float = 0.0
    recorded_usd: float = 0.0  # forerun's own figure
    over_seconds: float = 0.0  # what the run cost above its cap, as seconds of its machines
    saved: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass
class Listing:
    """`forerun ps`, while it runs. `existing` has the names of what existed when it began."""

    when: str
    existing: set[str]
    process: subprocess.Popen[str]


class FolderDelivery:
    """Brings the settings of the agent to the hosts through their folders, in place of ssh."""

    def __init__(self, hosts: Path) -> None:
        self.hosts = hosts

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        return {}

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        return ""

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        settings = json.loads(agent_settings(run, attempt, None, ready_at))
        for host in hosts:
            root = self.hosts / attempt.resource / f"host{host.index}"
            if not (root / "inbox").is_dir() or (root / "dead").exists():
                raise CloudUnavailable(f"host {host.index} does not answer")
            write(root / "inbox/agent.json", json.dumps(settings | {"host": host.index}))


class LogDisplay:
    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log

    def show(self, view: ControlView, action: Action) -> None:
        self.log(f"{view.now:.0f} {action}"[:300])

    def standby(self, view: ControlView, lease: LeaseEntry) -> None:
        self.log(f"{view.now:.0f} standby: {lease.holder}")

    def trouble(self, message: str) -> None:
        self.log(f"trouble: {message}"[:300])


def controller(wanted: CloudRun, hosts: Path, environment: Mapping[str, str], who: str, log: Path) -> NoReturn:
    """Be the process of a controller: the laptop begins or resumes the run, a keeper only controls it."""
    code = 1
    with log.open("a") as output:

        def tell(text: str) -> None:
            print(f"{who} {os.getpid()} {text}", file=output, flush=True)

        try:
            scale_waits(SPEED)
            os.environ.update(environment)
            rented = wanted.options[0].provider
            files, providers = RunFiles(wanted.folder), {rented: provider_named(rented)}
            now = providers[rented].now()
            ledger = RunLedger(log.with_name(f"{who}.ledger.json"))
            if who == "laptop":
                run = begin_run(files, wanted, providers, now, ledger=ledger)
            elif files.run() is None and ledger.agreed is None:
                os._exit(3)
            else:  # the keeper has the run in its settings
                run = replace(wanted, created_at=now)
                ledger.agree(run)
            control = Controller(
                run,
                files,
                providers,
                FolderDelivery(hosts),
                LogDisplay(tell),
                f"{who}:{os.getpid()}",
                since=now,
                ledger=ledger,
                elapsed=lambda: elapsed_seconds() * SPEED,
            )
            end = control.follow(lambda seconds: time.sleep(seconds / SPEED))[1]
            tell(f"end {end}")
            write(Path(wanted.folder).parent / "end.txt", "" if end is None else f"{end.reason} {end.detail}".strip())
            code = 0
        except BaseException as error:  # the user sees an error and repeats the command
            tell(f"{type(error).__name__}: {error}")
        finally:
            output.flush()
            os._exit(code)


class Trial:
    """One run with its faults."""

    def __init__(self, seed: int, folder: Path, provider: str, hostile: bool) -> None:
        self.random = random.Random(seed)
        self.folder, self.run_folder, self.hosts = folder, folder / "bucket" / "run", folder / "hosts"
        self.hosts.mkdir(parents=True)
        (self.run_folder / "checkpoints").mkdir(parents=True)
        self.record: RecordFaults | None = None
        if hostile:
            bucket = LocalBucket(self.run_folder)
            self.record = RecordFaults(LocalFolder(bucket.store / "cloud"), bucket, self.random)
        self.kinds, self.is_listed = HOSTILE_KINDS if hostile else KINDS, False
        self.listing: Listing | None = None
        # A third of the caps are too small for the job. An attempt needs three minutes of budget to begin.
        cap = USD_PER_HOUR[ZONES[0]] * self.random.choice((self.random.uniform(240, 500), 900.0, 1500.0)) / 3600
        self.result = TrialResult(seed, self.random.random() < 0.5, round(cap, 4))
        options = tuple(Option(provider, SLICE, zone, "spot", HOSTS, USD_PER_HOUR[zone]) for zone in ZONES)
        self.wanted = CloudRun("run", str(self.run_folder), "job", options, self.result.cap_usd, 0.0, export=True)
        self.processes: dict[str, int] = {}
        self.restart_at: dict[str, float] = {}

    def run(self, faults: int) -> TrialResult:
        began = time.monotonic()
        trainer: dict[str, Any] = {"step_seconds": STEP_SECONDS, "save_every": SAVE_EVERY, "total_steps": TOTAL_STEPS}
        trainer["folder"] = str(self.run_folder)
        agents = {"CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "1", "GOOGLE_CLOUD_PROJECT": "forerun-test"}
        machines = {"folder": str(self.hosts), "speed": SPEED, "trainer": trainer, "environment": agents}
        delays = {name: self.random.uniform(2, 30) for name in ("create_seconds", "delete_seconds", "queue_seconds")}
        with FakeCloud(
            machines="fake.process_hosts:ProcessMachines", machine_options=machines, speed=SPEED, **delays
        ) as cloud:
            self.cloud, self.environment = cloud, cloud.environment()
            try:
                self._follow(faults)
                self._clean_up()
                self._check()
            finally:
                for who in list(self.processes):
                    self._kill(who)
        self.result.seconds = round(time.monotonic() - began, 1)
        return self.result

    def _follow(self, faults: int) -> None:
        first = self.cloud.now()
        next_fault = first + self.random.uniform(5, 60)
        self.restart_at = {"laptop": first} | ({"keeper": first + 20} if self.result.keeper else {})
        while (now := self.cloud.now()) < first + LONGEST_SECONDS:
            for who, at in list(self.restart_at.items()):
                if now >= at:
                    del self.restart_at[who]
                    self._start(who)
            self._collect(now)
            if self.record is not None:
                self.record.end_due(now)
            if self.listing is not None and self.listing.process.poll() is not None:
                self._end_list()
            if not self.processes and not self.restart_at:
                return
            if len(self.result.faults) < faults and now >= next_fault:
                kind = self.random.choice(self.kinds)
                if self._inject(kind):
                    self.result.faults.append((round(now - first, 1), kind))
                    if kind in RECORD_KINDS and not self.is_listed:
                        self.is_listed = True
                        self._start_list(f"during the fault {kind!r}")
                next_fault = now + self.random.expovariate(1 / (45.0 if self.record is None else 20.0))
            time.sleep(0.1)
        self.result.problems.append("the run has not ended")

    def _start(self, who: str) -> None:
        pid = os.fork()
        if pid == 0:
            controller(self.wanted, self.hosts, self.environment, who, self.folder / "control.log")
        self.processes[who] = pid

    def _collect(self, now: float) -> None:
        """Note controllers that have ended. One that ended with an error is started again, as a user would."""
        for who, pid in list(self.processes.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found == 0:
                continue
            del self.processes[who]
            if os.waitstatus_to_exitcode(status) != 0 and not (self.folder / "bucket/end.txt").exists():
                self.restart_at[who] = now + self.random.uniform(5, 60)

    def _kill(self, who: str) -> bool:
        pid = self.processes.pop(who, None)
        if pid is None:
            return False
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return True

    def _inject(self, kind: str) -> bool:
        """Inject one fault. Return False if there is nothing that it could hit now."""
        if self.record is not None and kind in RECORD_KINDS:
            if kind in ENDING_KINDS and len(self.result.faults) < 4:
                return False  # a run that ends early meets no other faults
            return self.record.inject(kind, self.cloud.now())
        if kind in (*API_KINDS, *HOSTILE_API_KINDS):
            method = self.random.choice(("", "", "POST", "DELETE", "GET"))
            fault = Fault("error", http=int(kind)) if kind.isdigit() else Fault(kind)  # type: ignore[arg-type]
            fault.body = self.random.choice(sorted(MALFORMED)) if kind == "malformed" else ""
            fault.method, fault.count = method, self.random.choice((1, 2, 3, 8))
            fault.seconds, fault.tag = self.random.uniform(0.2, 2.0), str(len(self.result.faults))
            if kind == "429":
                fault.message = "Quota exceeded for quota metric 'Create node requests' per minute."
            self.cloud.inject(fault)
            return True
        if kind in ("laptop", "keeper"):
            if not self._kill(kind):
                return False
            self.restart_at[kind] = self.cloud.now() + self.random.uniform(5, 200)
            return True
        if kind == "capacity":
            zone = self.random.choice(ZONES)
            self.cloud.set_capacity(zone, SLICE, self.random.choice((0, 1, None)))
            return True
        running = [one["name"] for one in self.cloud.rentals() if one["ended_at"] is None and one["ready_at"]]
        if not running:
            return False
        name = running[0]
        root = self.hosts / name / f"host{self.random.randrange(HOSTS)}"
        if kind == "host":
            return kill_host(root)
        if kind in ("agent", "trainer"):
            return kill_process(root, kind)
        return bool(self.cloud.control("preempt", name=name, notice_seconds=30.0 if kind == "notice" else 0.0))

    def _clean_up(self) -> None:
        """Check that `forerun ps` lists what exists, then `forerun down --all`."""
        # A fault that no request has met was not a fault.
        fired = self.cloud.fired()
        self.result.faults = [
            fault
            for index, fault in enumerate(self.result.faults)
            if fault[1] not in (*API_KINDS, *HOSTILE_API_KINDS) or str(index) in fired
        ]
        self.cloud.clear_faults()
        if self.random.random() < 0.5:
            self.cloud.inject(Fault("error", http=503, count=2))
            self.cloud.inject(Fault("lost", method="DELETE"))
        for who in list(self.processes):
            self._kill(who)
        if self.record is not None:
            kind = self.random.choice(("", "denied", "denied", "damaged", "deleted", "forged number"))
            for _ in range(10 if kind else 0):
                self.record.inject(kind, self.cloud.now())
        self._end_list()
        self._start_list("at the end")
        self._end_list()
        done = self._command("down", "--all", "--yes")
        if done.returncode != 0:
            self.result.problems.append(f"forerun down: exit code {done.returncode}: {done.stderr[-500:]}")
        self.cloud.advance(60)
        left = [f"{one['kind']} {one['name']}" for one in self.cloud.resources()]
        if left:
            self.result.problems.append(f"leaked: {left}")

    def _start_list(self, when: str) -> None:
        command = [sys.executable, "-P", "-m", "forerun", "ps", "--all", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.listing = Listing(when, self._existing(), subprocess.Popen(command, env=self._variables(), **pipes))  # type: ignore[call-overload]

    def _end_list(self) -> None:
        """Check that `forerun ps` has listed what existed before and after it."""
        listing, self.listing = self.listing, None
        if listing is None:
            return
        try:
            output, errors = listing.process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            listing.process.kill()
            output, errors = "", "no answer within 300 s"
        missing = {name for name in listing.existing & self._existing() if name not in output}
        if missing or listing.process.returncode != 0:
            self.result.problems.append(f"forerun ps {listing.when} does not list {sorted(missing)}: {errors[-500:]}")

    def _existing(self) -> set[str]:
        """Return the names of what exists. A group represents its machines."""
        resources = self.cloud.resources()
        groups = {resource["name"] for resource in resources if resource["kind"] == "instance group"}
        return {resource["name"] for resource in resources if resource["name"].rpartition("-")[0] not in groups}

    def _variables(self) -> dict[str, str]:
        return os.environ | self.environment | {"XDG_CONFIG_HOME": str(self.folder / "config")}

    def _command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "forerun", *arguments]
        return subprocess.run(command, env=self._variables(), capture_output=True, text=True, check=False, timeout=300)

    def _check(self) -> None:
        result = self.result
        if self.record is not None:
            self.record.end_all()
        rentals = self.cloud.rentals()
        result.usd = sum(one["usd"] for one in rentals)
        result.attempts = len({one["name"] for one in rentals})
        price = min(USD_PER_HOUR.values())
        result.over_seconds = round(max(0.0, result.usd - result.cap_usd) / price * 3600, 1)
        if result.usd > result.cap_usd + max(USD_PER_HOUR.values()) * MINUTE / 3600:
            result.problems.append(f"cost ${result.usd:.4f} with a cap of ${result.cap_usd:.4f}")
        if any(one["ended_at"] is None for one in rentals):
            result.problems.append("machines still run")
        saved = self.run_folder.parent / "saved.txt"
        for line in saved.read_text().splitlines() if saved.exists() else ():
            result.saved += 1
            name, _ = line.split()
            file = self.run_folder / "checkpoints" / name
            step = int(name.removesuffix(".json"))
            if not file.exists() or json.loads(file.read_text())["state"] != state_after(step):
                result.problems.append(f"the checkpoint {name} is lost or wrong")
        end = self.folder / "bucket/end.txt"
        result.end = end.read_text() if end.exists() else "not ended"
        model = self.run_folder / "export/model.txt"
        is_missing = result.end.startswith("finished") and not model.exists()
        is_missing = is_missing and not ENDING_KINDS & {kind for _, kind in result.faults}
        if is_missing or (model.exists() and model.read_text() != state_after(TOTAL_STEPS)):
            result.problems.append("the exported model is missing or wrong")
        if self.record is not None:
            return  # the recorded costs are those of the faults
        if result.end.startswith("finished") and RunFiles(self.wanted.folder).finished() is None:
            result.problems.append("the end of training is not recorded")
        figures = [json.loads(path.read_text()) for path in self.run_folder.glob("cloud/attempts/*-end.json")]
        recorded = result.recorded_usd = sum(one["usd"] for one in figures)
        if recorded + 1e-6 < result.usd - max(USD_PER_HOUR.values()) * MINUTE / 3600:
            result.problems.append(f"forerun counts ${recorded:.4f}, the bill is ${result.usd:.4f}")


def one_trial(seed: int, faults: int, keep: str, provider: str, hostile: bool) -> TrialResult:
    """Run a trial. Keep its files in the folder `keep` if it fails."""
    with tempfile.TemporaryDirectory(prefix=f"cloud-{seed}-") as folder:
        result = Trial(seed, Path(folder), provider, hostile).run(faults)
        if result.problems and keep:
            log = (Path(folder) / "control.log").read_text()
            Path(keep).mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-r", folder, f"{keep}/{seed}"], check=False)
            (Path(keep) / f"{seed}.log").write_text(log)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("faults", type=int, help="how many faults to inject in total")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--provider", choices=PROVIDERS, default="tpu")
    parser.add_argument("--hostile", action="store_true", help="inject the faults of a hostile bucket and API")
    parser.add_argument("--each", type=int, default=6, help="faults of one trial, at most")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--keep", default="", help="a folder for the files of failed trials")
    parser.add_argument("--no-results", action="store_true", help="do not write bench/results")
    args = parser.parse_args()
    results: list[TrialResult] = []
    began = time.monotonic()
    seeds = itertools.count(args.seed)
    with ProcessPoolExecutor(args.workers, get_context("fork"), max_tasks_per_child=None) as pool:
        trial = partial(one_trial, faults=args.each, keep=args.keep, provider=args.provider, hostile=args.hostile)
        running = {pool.submit(trial, next(seeds)) for _ in range(args.workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for result in (one.result() for one in done):
                results.append(result)
                show(result)
            while len(running) < args.workers and sum(len(one.faults) for one in results) < args.faults:
                running.add(pool.submit(trial, next(seeds)))
    results.sort(key=lambda one: one.seed)
    if not args.no_results:
        record(f"{args.provider} hostile" if args.hostile else args.provider, results, time.monotonic() - began)
    sys.exit(1 if any(one.problems for one in results) else 0)


def show(result: TrialResult) -> None:
    kinds = " ".join(kind for _, kind in result.faults)
    cost = f"${result.usd:.3f} of ${result.cap_usd:.2f}, recorded ${result.recorded_usd:.3f}"
    print(f"{result.seed}: {result.end} | {cost} | {kinds}", flush=True)
    for problem in result.problems:
        print(f"    PROBLEM {problem}", flush=True)


def record(section: str, results: list[TrialResult], seconds: float) -> None:
    """Write the results of one section as JSON, and those of all as a table."""
    file = RESULTS / "cloud_faults.json"
    content = json.loads(file.read_text("utf-8")) if file.exists() else {}
    content[section] = {"seconds": round(seconds), "speed": SPEED, "trials": [asdict(one) for one in results]}
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")
    lines = ["# Random faults in cloud runs", "", "Written by `bench/cloud_faults.py`, which describes the trials.", ""]
    hostile = {f"{name} hostile": f"{title}, with a hostile bucket and API" for name, title in PROVIDERS.items()}
    for name, title in {**PROVIDERS, **hostile}.items():
        if name in content:
            trials = [TrialResult(**one) for one in content[name]["trials"]]
            lines += [f"## Slices as {title}", "", *table(trials)]
    (RESULTS / "cloud_faults.md").write_text("\n".join(lines), "utf-8")


def table(results: list[TrialResult]) -> list[str]:
    counts = Counter(kind for one in results for _, kind in one.faults)
    kinds = HOSTILE_KINDS if set(RECORD_KINDS) & set(counts) else KINDS
    hit = {kind: [trial for trial in results if kind in {name for _, name in trial.faults}] for kind in kinds}
    ends = Counter(one.end.split(" ")[0] for one in results)
    saved = sum(one.saved for one in results)
    failed = [one for one in results if one.problems]
    return [
        f"{sum(counts.values())} faults in {len(results)} runs; {len(failed)} runs with a problem.",
        "",
        "| check | result |",
        "| --- | --- |",
        f"| resources that exist after `forerun down --all` | {problem_count(results, 'leaked')} |",
        f"| runs that cost more than the cap plus one minute | {problem_count(results, 'cost $')} |",
        f"| most above the cap, as seconds of the slice | {max(one.over_seconds for one in results):.0f} |",
        f"| lost or wrong checkpoints, of {saved} | {problem_count(results, 'checkpoint')} |",
        f"| wrong models, of {ends.get('finished', 0)} finished runs | {problem_count(results, 'exported model')} |",
        f"| resources that `forerun ps` did not list | {problem_count(results, 'forerun ps')} |",
        f"| runs that ended: {', '.join(f'{name} {count}' for name, count in sorted(ends.items()))} | {len(results)} |",
        f"| slices rented | {sum(one.attempts for one in results)} |",
        "",
        "| fault | injected | in runs |",
        "| --- | --- | --- |",
        *(f"| {NAMES[kind]} | {counts[kind]} | {len(hit[kind])} |" for kind in kinds),
        "",
        *(f"Seed {one.seed}: {'; '.join(one.problems)}\n" for one in failed),
    ]


def problem_count(results: list[TrialResult], text: str) -> int:
    return sum(text in problem for one in results for problem in one.problems)


if __name__ == "__main__":
    main()
