"""Signals to real runs of one host: `python tests/faults/runs_rig.py FAULT TRIALS [FIRST]`, one JSON line per trial.

    python tests/faults/runs_rig.py sigkill 200     # half an hour on two cores
    python tests/faults/runs_rig.py sigterm 30      # six minutes
    python tests/faults/runs_rig.py restart 10      # two minutes

A run is hit several times on its way, each time once it has made a new step since the last, and must be EXACT at its
end (`runs.py`); then the next run begins. Each trial is a function of its number, up to the machine's own timing.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hosts_job import gone
from rig import attached_strace, print_lines
from runs import PATIENCE_SECONDS, Bench, Outcome, Run

from forerun.exit_codes import STOPPED

Line = dict[str, Any]
HITS_OF_A_RUN = 10
START_SECONDS, STEPS_SECONDS, SAVE_SECONDS = 4.0, 1.0, 0.12
RESTARTS = 3  # in a row before a new step; a supervisor gives up after five
GRACES = (30, 10, 3)
PHASE = re.compile(r"^(data|trace|lower|compile|state) ([\d.]+) (ms|s|µs|us)  ", re.MULTILINE)
UNIT_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6}


# SIGKILL


def sigkill(bench: Bench, expected: Outcome, trials: int, first: int = 0) -> Iterator[Line]:
    begun, number = first, first // HITS_OF_A_RUN
    while begun < trials:
        lines = killed_run(bench, expected, number, begun, min(HITS_OF_A_RUN, trials - begun))
        begun, number = begun + len(lines), number + 1
        yield from lines


def killed_run(
    bench: Bench, expected: Outcome, number: int, first: int, hits: int, *, held: bool = False
) -> list[Line]:
    """Killed so many times, or fewer if it comes to its end before. With `held` it cannot: the first save after a kill
    that gets further than the run had come ends only when the next kill has come."""
    supervise = number % 2 == 0
    lines: list[Line] = []
    last, seconds = bench.steps, PATIENCE_SECONDS
    brake = bench.held_back(bench.every, last, commit_seconds=seconds) if held else nullcontext()
    with bench.run(f"killed-{number}") as run, brake:
        run.start(supervise=supervise)
        in_a_row = 0
        while len(lines) < hits:
            chance = random.Random(f"sigkill {first + len(lines)}")
            moment = moment_of(chance, supervise, in_a_row)
            line = killed(run, moment, chance, lines[-1] if lines else None)
            if line is None:
                break
            in_a_row = in_a_row + 1 if moment == "start" else 0
            lines.append({"fault": "sigkill", "trial": first + len(lines), "run": number, **line})
            if len(lines) == hits:
                bench.release()
            elif held:
                bench.brake((line["step"] // bench.every + 1) * bench.every, last, commit_seconds=seconds)
            run.go_on()
            if run.over:
                run.start(supervise=supervise)
        if lines:
            recovered(run, lines[-1])
        run.finish()
        different = run.outcome().differs_in(expected)
    for line in lines:
        line.pop("said", None)
        line |= {"exact": not different and line.pop("resumed_right", True)} | (
            {"differs": different} if different else {}
        )
    return lines


def moment_of(chance: random.Random, supervise: bool, in_a_row: int) -> str:
    moment = chance.choices(("save", "steps", "start", "supervisor"), (50, 28, 14, 8 if supervise else 0))[0]
    return "steps" if moment == "start" and in_a_row >= RESTARTS else moment


def killed(run: Run, moment: str, chance: random.Random, before: Line | None) -> Line | None:
    """One kill, after which a supervisor still stands still; None if the run was over before. The line of the kill
    before gets its figures of recovery."""
    if moment == "start":
        time.sleep(chance.uniform(0, START_SECONDS))
    elif (before and not recovered(run, before)) or not run.wait_for(run.last_step):
        return None
    elif moment != "save":
        time.sleep(chance.uniform(0, STEPS_SECONDS))
    worker = caught(run, chance, saving=moment == "save")
    if worker is None:
        return None
    at, newest = run.last_step(), run.newest()
    line = {
        "moment": moment,
        "supervised": run.supervised,
        "inside_a_save": bool(run.uncommitted()),
        "step": at,
        "committed": newest,
        "lost_steps": at - newest,
        "said": len(run.said()),
    }
    line["unix_seconds"] = run.kill(run.process.pid if moment == "supervisor" else worker)
    assert gone(worker, 300), "it outlived its supervisor"
    return line


def caught(run: Run, chance: random.Random, *, saving: bool) -> int | None:
    """The worker, stopped, with its supervisor; inside a save if wanted, somewhere in it. None if the run was over
    before.

    Only of processes that stand still is it known where they are: a save may end between a look at it and a signal, and
    after a kill the next worker tidies up.
    """
    while run.wait_for(run.uncommitted if saving else run.worker, every=0.001):
        if saving:
            time.sleep(chance.uniform(0, SAVE_SECONDS))
        worker = run.freeze()
        if run.over:
            return None
        if worker is not None and (run.uncommitted() or not saving):
            return worker
        run.go_on()  # it has ended its save, or a supervisor is about to start the next one
    return None


def recovered(run: Run, line: Line) -> bool:
    """Waits for the first step that is new since the kill; False if the run was over before."""
    come = run.wait_for_new_step(line["step"])
    if come is None:
        return False
    if "recovery_seconds" not in line:
        line["recovery_seconds"] = round(come - line["unix_seconds"], 2)
        resumed = run.resumed_after(line["said"])
        line |= {"resumed_at": resumed, "resumed_right": resumed == line["committed"]}
    return True


# SIGTERM


def in_steps(run: Run, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, 0.5))


def in_save(run: Run, chance: random.Random) -> None:
    run.wait_for(run.uncommitted, every=0.001)


def in_data_wait(run: Run, chance: random.Random) -> None:
    """No batch is built any more, and those that are ready are used up."""
    run.bench.brake(0, run.bench.steps, data_seconds=PATIENCE_SECONDS)
    before = -1
    while before != (before := run.last_step()):
        time.sleep(1.0)


def let_go(run: Run, seconds: float) -> None:
    """Build batches again, once the step is committed after which the loop waited."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and run.newest() != run.last_step():
        time.sleep(0.02)
    run.bench.release()


def in_compile(run: Run, chance: random.Random) -> None:
    run.wait_for(lambda: "\ncompile ..." in run.said_now())
    time.sleep(chance.uniform(0, 1.5))


def in_restore(run: Run, chance: random.Random) -> None:
    run.wait_for(lambda: "\nstate ..." in run.said_now())


def cold(bench: Bench, number: int) -> dict[str, str]:
    return {"JAX_COMPILATION_CACHE_DIR": str(bench.folder / "cold" / str(number))}


# Where the signal falls: how it gets there, whether steps were made, whether a supervisor watches, who gets it.
WINDOWS: dict[str, tuple[Callable[[Run, random.Random], None], bool, bool, str]] = {
    "steps": (in_steps, True, False, "worker"),
    "steps, supervised": (in_steps, True, True, "supervisor"),
    "steps, the worker of a supervisor": (in_steps, True, True, "worker"),
    "save": (in_save, True, False, "worker"),
    "waiting for data": (in_data_wait, True, False, "worker"),
    "compile": (in_compile, False, False, "worker"),
    "compile, supervised": (in_compile, False, True, "supervisor"),
    "restore": (in_restore, False, False, "worker"),
    "a save slower than the grace": (in_steps, True, False, "worker"),
    "twice": (in_steps, True, False, "worker"),
}


def sigterm(bench: Bench, expected: Outcome, trials: int, first: int = 0) -> Iterator[Line]:
    """A run for each grace, stopped once in every window."""
    for begin in range(first, trials, len(WINDOWS)):
        lines = []
        with bench.run(f"stopped-{begin}") as run:
            for number in range(begin, min(begin + len(WINDOWS), trials)):
                lines.append(stopped(bench, run, number, GRACES[begin // len(WINDOWS) % len(GRACES)]))
            run.start()
            run.finish()
            different = run.outcome().differs_in(expected)
        for line in lines:
            line["exact"] = not different
            line["ok"] = line.pop("good") and not different
            yield line


def stopped(bench: Bench, run: Run, number: int, grace: int) -> Line:
    window = list(WINDOWS)[number % len(WINDOWS)]
    reach, stepping, supervise, whom = WINDOWS[window]
    chance = random.Random(f"sigterm {number}")
    before = run.last_step()
    run.start(supervise=supervise, environment=cold(bench, number) if "compile" in window else None)
    if stepping:
        assert run.wait_for_new_step(before), run.said_now()
    slow = slowed(run) if "slower" in window else None
    reach(run, chance)
    pid = run.process.pid if whom == "supervisor" else run.worker()
    sent = run.kill(pid, signal.SIGTERM)
    if window == "waiting for data":
        let_go(run, grace / 2)
    if window == "twice":
        time.sleep(0.05)
        run.kill(pid, signal.SIGTERM)
    try:
        code = run.process.wait(max(0.0, sent + grace - time.time()))
    except subprocess.TimeoutExpired:  # the machine is taken away, with all that is on it
        run.kill(run.process.pid)
        code = -9
    seconds = time.time() - sent
    if slow is not None:
        slow.terminate()
        slow.communicate()
    at, newest = run.last_step(), run.newest()
    committed = newest == at
    if slow is not None and grace < 3 * SLOW_SECONDS:  # the save under way and the last one do not fit
        good = code in (-9, STOPPED) and newest >= before  # cut off: what was committed before is what counts
    else:
        good = code == STOPPED and (committed or not stepping)
    return {
        "fault": "sigterm",
        "trial": number,
        "window": window,
        "grace_seconds": grace,
        "code": code,
        "stop_seconds": round(seconds, 2),
        "step": at,
        "committed": newest,
        "lost_steps": at - newest,
        "good": good,
    }


SLOW_SECONDS = 5


def slowed(run: Run) -> subprocess.Popen[str]:
    """From here on, what makes a record last takes seconds."""
    return attached_strace(run.worker(), "link", f"delay_enter={SLOW_SECONDS}000000")


# Restart


def restart(bench: Bench, expected: Outcome, trials: int, first: int = 0) -> Iterator[Line]:
    """From the start of a process to its first new step, with everything that can be warm warm."""
    for begin in range(first, trials, HITS_OF_A_RUN):
        lines = []
        with bench.run(f"restarted-{begin}") as run:
            run.start()
            run.wait_for_new_step(2 * bench.every)
            for number in range(begin, min(begin + HITS_OF_A_RUN, trials)):
                run.wait_for_new_step(run.last_step())
                run.kill(run.worker())
                at = run.last_step()
                run.start()
                assert run.wait_for(run.said_now)
                spoken = time.time() - run.started
                come = run.wait_for_new_step(at)
                assert come is not None
                lines.append({"fault": "restart", "trial": number, "restart_seconds": round(come - run.started, 2)})
                lines[-1] |= {"imports_seconds": round(spoken, 2), **phases(run)}
                lines[-1]["steps_again"] = at - run.resumed_at()[-1]
            run.finish()
            different = run.outcome().differs_in(expected)
        yield from ({**line, "exact": not different} for line in lines)


def phases(run: Run) -> Line:
    found = PHASE.findall(run.said_now())
    return {f"{name}_seconds": round(float(value) * UNIT_SECONDS[unit], 3) for name, value, unit in found}


FAULTS: dict[str, Callable[[Bench, Outcome, int, int], Iterator[Line]]] = {
    "sigkill": sigkill,
    "sigterm": sigterm,
    "restart": restart,
}


def lines(fault: str, trials: int, first: int = 0) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder, "bench"))
        yield from FAULTS[fault](bench, bench.reference(), trials, first)


if __name__ == "__main__":
    sys.exit(print_lines(lines(sys.argv[1], *map(int, sys.argv[2:]))))
