"""The fault matrix in one command.

    python tests/faults/matrix.py --part ci         # a sample of everything, ten minutes
    python tests/faults/matrix.py --part night      # the whole
    python tests/faults/matrix.py --only sigkill --trials 200

Every fault is a rig of its own beside this file, which prints one JSON line per trial; here they are run one after the
other, judged by one rule (`ok`), and collected in one file: a line per trial, and one line about each rig's run (when,
how long, the machine's load). Lines of a fault that is run again replace the former ones. `table.py` makes the table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "matrix.jsonl"
Line = dict[str, Any]


def good(line: Line) -> bool:
    """The rigs' own verdict."""
    return bool(line["ok"] if "ok" in line else line["good"] if "good" in line else line["exact"])


def found_and_fallen_back(line: Line) -> bool:
    return bool(line["detected"] and line["restored"] == line["expected"] and line["told"] and not line["silent"])


def named(line: Line) -> bool:
    return bool(line["exact"] and line["culprit_right"])


def nothing_open(line: Line) -> bool:
    return line["open_from_outside"] == []


@dataclass(frozen=True)
class Fault:
    """`command` without its interpreter; `{n}` is the number of trials. A count of 0: not in that part."""

    name: str
    what: str
    how: str
    command: str
    ci: int
    night: int
    passed: Callable[[Line], bool] = good
    figures: tuple[str, ...] = ()
    root: bool = False

    @property
    def rig(self) -> Path:
        return HERE / self.command.split()[0]

    def words(self, trials: int) -> list[str]:
        _, *words = self.command.format(n=trials).split()
        return [sys.executable, str(self.rig), *words]


def hosts(
    name: str,
    what: str,
    how: str,
    ci: int,
    night: int,
    passed: Callable[[Line], bool] = good,
    rig: str = "runs_hosts.py {} {{n}} 4",
) -> Fault:
    figures = ("stop_seconds",) if "sigterm" in name else ("detect_seconds", "recover_seconds")
    return Fault(f"hosts {name}", what, how, rig.format(name), ci, night, passed, figures)


SMALL = "hosts_rig.py {} {{n}} jax 4"  # hosts whose step is a sum over all, under real supervisors
SIGNALS = "a real run of one host"
FAULTS = (
    Fault(
        "sigkill",
        "SIGKILL at any moment, EXACT",
        f"{SIGNALS}, half of them supervised; half of the kills aimed at a save in progress",
        "runs_rig.py sigkill {n}",
        6,
        200,
        figures=("recovery_seconds", "lost_steps"),
    ),
    Fault(
        "sigterm",
        "SIGTERM, then SIGKILL after 30, 10 or 3 s",
        f"{SIGNALS}: in steps, a save, a data wait, a compilation, a restore; twice; a save slower than the grace",
        "runs_rig.py sigterm {n}",
        4,
        30,
        figures=("stop_seconds", "lost_steps"),
    ),
    Fault(
        "interrupt",
        "Ctrl-C at any moment of any command",
        "16 commands; SIGINT to the process group at a random moment, a fifth of them twice",
        "interrupt_trials.py {n}",
        16,
        200,
        figures=("stop_seconds",),
    ),
    Fault(
        "looks",
        "SIGTERM during a validation, then SIGKILL after 30, 10 or 3 s",
        f"{SIGNALS} that validates after every fifth step; half of them supervised",
        "runs_looks.py {n}",
        2,
        30,
        figures=("stop_seconds", "lost_steps"),
    ),
    Fault(
        "restart",
        "killed and restarted with warm caches",
        f"{SIGNALS}: from the start of the process to its first new step",
        "runs_rig.py restart {n}",
        2,
        10,
        figures=("restart_seconds", "imports_seconds"),
    ),
    Fault(
        "mesh",
        "resumed on another mesh, possible or not",
        "data x fsdp x tp over 1 to 16 virtual devices, 50 steps after 10 on the first mesh",
        "runs_mesh.py {n}",
        3,
        30,
        figures=("worst_relative",),
    ),
    Fault(
        "reject",
        "a second launch of a running job is rejected, EXACT",
        f"{SIGNALS}, stopped while a second process starts",
        "runs_owner.py reject {n}",
        1,
        10,
    ),
    Fault(
        "second",
        "a second launch of a running job, with --take-over",
        "both processes continue from the moment of the second's claim",
        "runs_owner.py second {n}",
        1,
        30,
        figures=("double_commits",),
    ),
    Fault(
        "late",
        "a stopped process that resumes after another took over the run",
        "SIGSTOP, a second launcher with --take-over, SIGCONT",
        "runs_owner.py late {n}",
        1,
        30,
        figures=("double_commits",),
    ),
    Fault(
        "damage",
        "flipped bit, zeroed page, truncated, missing or swapped file",
        "in the newest of three checkpoints",
        "checkpoint_damage.py {n}",
        100,
        1000,
        found_and_fallen_back,
    ),
    Fault(
        "kill in saves",
        "SIGKILL during back-to-back saves",
        "a process that only saves, without steps",
        "checkpoint_kill.py random {n}",
        20,
        200,
        figures=("seconds",),
    ),
    Fault("system calls", "SIGKILL at every system call of a save", "strace", "checkpoint_kill.py syscalls", 0, 1),
    Fault("failing calls", "EIO and ENOSPC from system calls of a save", "strace", "checkpoint_kill.py errors", 0, 1),
    Fault("cache", "a damaged or foreign compile cache", "seven kinds of damage", "cache_damage.py {n}", 35, 300),
    hosts("kill", "kill -9 of one of four hosts' workers, EXACT", "a real run of four hosts", 1, 20),
    hosts("kill-coordinator", "kill -9 of the coordinator, EXACT", "SIGKILL to host 0's worker", 0, 20),
    hosts("kill-host", "a host is gone for a second, EXACT", "SIGKILL to supervisor and worker", 0, 10),
    hosts("stop", "a stopped worker is found and named, EXACT", "SIGSTOP to a worker", 1, 20),
    hosts("sigterm", "SIGTERM to one of four hosts: all stop after one step, EXACT", "then all restart", 1, 20),
    Fault("hosts resize", "4, 2, 1, then 8 hosts", "one run, stopped and resumed", "runs_hosts.py resize {n}", 0, 1),
    hosts("sleep", "a worker that sleeps before a step is found", "the worker sleeps", 0, 20, named, SMALL),
    hosts("kill-leader", "the leader is gone for a second", "SIGKILL to host 0's supervisor", 0, 10, good, SMALL),
    hosts("freeze-host", "a host hangs for 10 s", "SIGSTOP, SIGCONT to its processes", 0, 10, good, SMALL),
    Fault(
        "partition",
        "one of three hosts loses its connection for 8 s",
        "network namespaces, link down",
        "hosts_net_rig.py cut {n} 8",
        0,
        30,
        figures=("recover_seconds",),
        root=True,
    ),
    Fault(
        "scan",
        "a port scan from outside the run",
        "network namespaces",
        "hosts_net_rig.py scan {n}",
        0,
        1,
        nothing_open,
        root=True,
    ),
    Fault(
        "storm",
        "faults of all kinds, one every 20 to 60 s",
        "one run under constant faults",
        "storm.py --minutes {n}",
        0,
        20,
    ),
    Fault(
        "flip",
        "one bit flips in one host's weights: found, host named, EXACT",
        "three hosts that compare their copies every second step",
        "runs_flip.py {n}",
        1,
        12,
        figures=("late_steps",),
    ),
    Fault("numbers", "NaN and spikes", "in the gradient of a step", "guard_rig.py {n}", 3, 30),
    *(
        Fault(f"storage disk-{kind}", what, how, f"storage_rig.py disk-{kind} {{n}}", 1, 20, root=True)
        for kind, what, how in (
            ("full", "the disk fills up for seconds, EXACT", f"{SIGNALS}, on a tmpfs; half of them supervised"),
            ("eio", "the disk answers EIO for seconds, EXACT", f"{SIGNALS}, with strace; half of them supervised"),
        )
    ),
    *(
        Fault(f"storage {kind}", what, "a proxy in front of an emulator", f"storage_rig.py {kind} {{n}}", ci, 10)
        for kind, what, ci in (
            ("bucket-flaky", "the bucket answers 429 and 503", 1),
            ("bucket-refuse", "the bucket refuses connections", 0),
            ("bucket-close", "the bucket closes connections", 0),
            ("bucket-hang", "the bucket does not answer", 0),
            ("bucket-slow", "the bucket is slow", 0),
            ("bucket-reset", "the bucket resets connections", 0),
            ("bucket-lost", "the bucket's answers are lost", 0),
            ("bucket-kill", "SIGKILL while saving to a bucket", 0),
        )
    ),
    *(
        Fault(
            f"data {kind}", what, "a proxy in front of emulators of GCS and S3", f"data_rig.py {kind} {{n}}", 0, night
        )
        for kind, what, night in (
            ("clean", "tokens in a bucket, on one and four hosts, with and without cache, EXACT", 8),
            ("faults", "one read of tokens in fifty fails, is slow, short or flipped: all reported, EXACT", 8),
            ("deleted", "the same faults, and the cache of tokens is deleted during the run, EXACT", 4),
            ("damaged", "a unit that is damaged in the bucket is rejected by name", 2),
        )
    ),
    *(
        Fault(f"storage {kind}", what, how, f"storage_rig.py {kind} {{n}}", ci, night)
        for kind, what, how, ci, night in (
            ("tracker-500", "the tracker answers 500", "a test server", 1, 5),
            ("tracker-hang", "the tracker does not answer", "a test server", 0, 5),
            ("tracker-close-later", "the tracker closes connections during the run", "a test server", 0, 5),
            ("clock-restarts", "the clock jumps between restarts", "libfaketime", 0, 10),
            ("clock-run", "the clock jumps in a run", "libfaketime", 0, 10),
            ("lock-dead", "the TPU's lock is held by a dead process", "a lock file", 1, 10),
            ("lock-live", "the TPU's lock is held by a live process", "a lock file", 1, 10),
        )
    ),
)


def trials_of(fault: Fault, count: int) -> Iterator[Line]:
    """One line per trial as the rig prints them, judged; then one about the rig's run."""
    began, load = time.time(), os.getloadavg()[0]
    source = str(HERE.parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed: with compiled modules
    number = 0
    with subprocess.Popen(fault.words(count), env=environment, stdout=subprocess.PIPE, text=True) as child:
        for text in child.stdout or ():
            line = json.loads(text)
            if not {"trial", "kill", "when", "number"} & set(line):
                continue  # a summary: `table.py` makes its own
            told = {key: value for key, value in line.items() if key not in ("fault", "trial", "seed", "ok")}
            about = {"fault": fault.name, "trial": number, "seed": line.get("trial", number)}
            yield {**about, "ok": fault.passed(line), **told}
            number += 1
    code = child.returncode
    yield {
        "fault": fault.name,
        "about": {
            "command": f"python tests/faults/{fault.command.format(n=count)}",
            "code": code,
            "trials": number,
            "seconds": round(time.time() - began, 1),
            "load_before_after": [round(load, 1), round(os.getloadavg()[0], 1)],
            "cores": len(os.sched_getaffinity(0)),
            "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
            "python": platform.python_version(),
            "jax": importlib.metadata.version("jax"),
        },
    }


def chosen(part: str, only: list[str], trials: int | None) -> list[tuple[Fault, int]]:
    known = [fault.name for fault in FAULTS]
    unknown = [name for name in only if name not in known]
    if unknown:
        sys.exit(f"unknown fault {unknown[0]!r}; known: {', '.join(known)}")
    found = []
    for fault in FAULTS:
        count = trials or (fault.ci if part == "ci" else fault.night)
        if fault.name not in only and (only or count == 0):
            continue
        if not fault.rig.exists() or (fault.root and os.geteuid() != 0):
            print(f"skipped: {fault.name} ({'needs root' if fault.rig.exists() else f'{fault.rig.name} is not here'})")
            continue
        found.append((fault, count or fault.night))
    return found


def kept(out: Path, without: str) -> list[str]:
    lines = out.read_text().splitlines() if out.exists() else []
    return [line for line in lines if json.loads(line)["fault"] != without]


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--part", choices=("ci", "night"), default="ci")
    words.add_argument("--only", action="append", default=[], help="a fault's name; may be given again")
    words.add_argument("--trials", type=int)
    words.add_argument("--out", type=Path, default=RESULTS)
    given = words.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for fault, count in chosen(given.part, given.only, given.trials):
        before, lines = kept(given.out, fault.name), []
        for line in trials_of(fault, count):
            lines.append(line)
            given.out.write_text("".join(f"{text}\n" for text in (*before, *map(json.dumps, lines))))
        about, passed = lines[-1]["about"], sum(line.get("ok", False) for line in lines)
        print(f"{fault.name}: {passed} of {about['trials']} in {about['seconds']} s, load {about['load_before_after']}")
        if passed < about["trials"] or about["code"] or not about["trials"]:
            failed.append(fault.name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
