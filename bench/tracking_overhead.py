"""Overhead of trackers, goodput and events: the wall time of a step with all of them relative to a step without.

    python bench/tracking_overhead.py            # about 3 minutes on two idle cores

Both variants run the same compiled training step in one process, in blocks of a few steps that alternate (with,
without, without, with, ...), so that other load on the machine affects both equally. Each step logs a row. The variant
without writes the row to metrics.jsonl only. The other one also writes goodput and events, and TensorBoard, MLflow,
wandb (online) and trackio receive the rows. A pause after each of its blocks lets the trackers finish, so that their
work does not slow down the other variant.

The servers of MLflow and wandb are those of the tests, in a separate process: a real one runs on another machine.
Writes bench/results/tracking_overhead.json. Also reports the CPU time of all threads and processes of the trackers per
row, which other load does not change.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
KEY = "0" * 40
PAIRS, STEPS, PAUSE_SECONDS = 16, 16, 3.5
TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
JOB = {
    "model": {"layers": 4, "embed": 192, "heads": 4},
    "data": str(ROOT.parent / "examples/quickstart/text"),
    "sequence": 128,
    "batch": 8,
    "steps": 10**6,
    "precision": {"compute": "float32"},
    "remat": "none",
}


def serve() -> None:
    """Run the servers until the standard input ends, and print their addresses."""
    sys.path[:0] = [str(ROOT.parent / "tests" / folder) for folder in ("support", "unit/track")]
    from mlflow_server import MlflowServer
    from wandb_server import WandbServer

    with MlflowServer().serve() as mlflow, WandbServer(KEY).serve() as wandb:
        print(mlflow, wandb, flush=True)
        sys.stdin.read()


def cpu_seconds(stat: Path) -> float:
    """Return the CPU time of a process or a thread from its file in /proc."""
    values = stat.read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / TICKS_PER_SECOND


def descendants(process: int) -> list[int]:
    """Return the processes that a process has started, and those that they have started."""
    found = [
        int(child) for file in Path(f"/proc/{process}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [*found, *(below for child in found for below in descendants(child))]


def tracker_seconds(but: int) -> dict[str, float]:
    """Return the CPU time of the trackers so far: of their threads in this process, and of their processes."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("track ")]
    clients = {process for process in descendants(os.getpid()) if process != but}
    return {
        "threads": sum(cpu_seconds(Path(f"/proc/self/task/{thread.native_id}/stat")) for thread in threads),
        "processes": sum(cpu_seconds(Path(f"/proc/{process}/stat")) for process in clients),
    }


def main() -> None:
    """Measure, print and write the results."""
    with ExitStack() as stack:
        command = [sys.executable, "-P", __file__, "--servers"]
        servers = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert servers.stdin is not None
        assert servers.stdout is not None
        mlflow, wandb = servers.stdout.readline().split()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        os.environ.update(WANDB_BASE_URL=wandb, WANDB_API_KEY=KEY, TRACKIO_DIR=str(folder / "trackio"))
        result = measure(folder, mlflow, servers.pid)
        servers.stdin.close()
    (ROOT / "results" / "tracking_overhead.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def measure(folder: Path, mlflow: str, servers: int) -> dict[str, Any]:
    """Return the measured times."""
    import io

    import jax

    from forerun.config.schema import Job
    from forerun.hardware.devices import choose
    from forerun.reporter import LineReporter
    from forerun.resolve.job_corpus import open_corpus
    from forerun.resolve.resolve_model import resolve_model
    from forerun.run.compile_step import compile_step
    from forerun.run.open_data import Placement, batches_of
    from forerun.run.run_devices import program_on
    from forerun.track.display.make_display import make_display
    from forerun.track.forwarder import tracking
    from forerun.track.metrics import MetricsLog
    from forerun.track.run_times import RunTimes

    job = Job.model_validate({**JOB, "track": {"to": TRACKERS, "url": mlflow}})
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    devices = choose("cpu", 1)
    job, program = resolved.job, program_on(resolved, devices, len(corpus.rows))
    step = compile_step(program, make_display(io.StringIO()))
    batch = Placement(program.batch)(batches_of(resolved, program, corpus).batch_at(0))
    schedule, state = program.placed_schedule(), program.initial_state(0)
    row = {f"figure_{number}": float(number) for number in range(12)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    blocks: dict[bool, list[float]] = {True: [], False: []}
    counts = {True: 0, False: 0}
    paths = {is_tracked: folder / str(is_tracked) / "metrics.jsonl" for is_tracked in (True, False)}
    for path in paths.values():
        path.parent.mkdir()
    times = RunTimes()
    times.open(paths[True].with_name("events.jsonl"))
    times.resume(0)
    times.phase("steps")
    with MetricsLog(paths[False]) as plain, MetricsLog(paths[True]) as tracked, ExitStack() as stack:
        stack.enter_context(tracking(job, paths[True], PAIRS * STEPS, LineReporter(sys.stdout)))

        def block(is_tracked: bool) -> None:
            nonlocal state
            own = []
            for _ in range(STEPS):
                began = time.perf_counter()
                state, metrics = step._run(state, batch, schedule)
                jax.block_until_ready((state, metrics))
                counts[is_tracked] += 1
                if is_tracked:
                    times.finish_step(counts[True], 0.0, is_useful=True)
                    tracked.write(counts[True], **row, **times.shares())
                    times.mark(counts[True])
                else:
                    plain.write(counts[False], **row)
                own.append(time.perf_counter() - began)
            seconds[is_tracked] += own
            blocks[is_tracked].append(statistics.median(own))
            if is_tracked:
                time.sleep(PAUSE_SECONDS)

        block(True)
        _wait_for(paths[True].with_name("tracked.json"), STEPS - 1)
        for values in (*seconds.values(), *blocks.values()):
            values.clear()
        before, first = tracker_seconds(servers), counts[True]
        for pair in range(PAIRS):
            order = (True, False) if pair % 2 else (False, True)
            for is_tracked in order:
                block(is_tracked)
        after, rows = tracker_seconds(servers), counts[True] - first
    ratios = [one / other for one, other in zip(blocks[True], blocks[False], strict=True)]
    spread = statistics.quantiles(ratios, n=4)
    return {
        "trackers": TRACKERS,
        "rows": rows,
        "step_seconds_without": round(statistics.median(seconds[False]), 4),
        "step_seconds_with": round(statistics.median(seconds[True]), 4),
        "ratio_of_medians": round(statistics.median(seconds[True]) / statistics.median(seconds[False]), 4),
        "median_ratio_of_pairs": round(statistics.median(ratios), 4),
        "quartiles_of_pairs": [round(spread[0], 4), round(spread[2], 4)],
        "cpu_milliseconds_per_row": {
            name: round(1000 * (after[name] - before[name]) / rows, 3) for name in ("threads", "processes")
        },
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def _wait_for(cursor: Path, step: int) -> None:
    """Wait until all trackers have begun and have received the first rows."""
    while any(json.loads(cursor.read_text())["steps"].get(name, 0) < step for name in TRACKERS):
        time.sleep(0.1)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--servers"] else main()
