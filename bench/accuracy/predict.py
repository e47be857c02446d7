"""Compile every published run and record the predicted step time. Runs that are recorded and stored are skipped.

python bench/accuracy/predict.py [name ...]    # ten minutes or so; needs libtpu (the `plan` extra), no TPU

Writes one JSON line per run to bench/results/accuracy.jsonl. The scheduled programs, which `evaluate.py` simulates
again with other constants, are stored outside the repository (FORERUN_ACCURACY_CACHE, or ~/.cache/forerun).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runs import Run, runs
from tpu_worker import SETTINGS

from forerun.errors import UserError
from forerun.planner.compile import compiler, fork_server
from forerun.planner.compile.request import CompileRequest
from forerun.planner.hlo import Module, parse

RESULTS = Path(__file__).resolve().parents[1] / "results" / "accuracy.jsonl"
CACHE = Path(os.environ.get("FORERUN_ACCURACY_CACHE", Path.home() / ".cache" / "forerun" / "accuracy"))
WORKER = Path(__file__).resolve().parent / "tpu_worker.py"
AT_ONCE = int(os.environ.get("FORERUN_ACCURACY_AT_ONCE", "2"))
_writing = threading.Lock()
_here = threading.local()


def job_hash(run: Run) -> str:
    """Return the hash of the run's slice, job and flags. It does not change when the job format gains a key."""
    content: list[Any] = [run.slice, run.job]
    if run.flags is not None or run.kernel is not None or run.layers:
        content.append(own_settings(run))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def own_settings(run: Run) -> dict[str, Any]:
    """Return the settings of a run that replace forerun's own, for tpu_worker.py."""
    settings = {"options": None if run.flags is None else run.flags.values, "kernel": run.kernel}
    return {**settings, "layers": run.layers} if run.layers else settings


def scheduled_path(run: Run) -> Path:
    return CACHE / f"{job_hash(run)}-{version('libtpu')}.hlo.gz"


def recorded() -> dict[str, dict[str, Any]]:
    """Return the recorded rows by `job_hash`."""
    if not RESULTS.exists():
        return {}
    return {row["job"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}


def recomputed_by_compiler(scheduled: str) -> int:
    """Return the number of instructions that the compiler repeats for lack of HBM, beyond the job's own remat.

    If it is not zero, the program is not the one that was measured.
    """
    return len(re.findall(r"^\s+%?[\w.\-]*\.remat[\w.]* = ", scheduled, re.MULTILINE))


def is_current(run: Run, row: dict[str, Any] | None) -> bool:
    """Whether the run is recorded and its scheduled program is stored."""
    if row is None or (row["job"], row["libtpu"]) != (job_hash(run), version("libtpu")):
        return False
    return scheduled_path(run).exists() or not row.get("seconds")


class Truncated(Exception):
    """Raised if the compiler has not finished writing the program."""


def use_own_server() -> None:
    """Compile in workers of tpu_worker.py, with the settings of the run that the thread of a request compiles."""
    environment = compiler._environment

    def with_settings(question: CompileRequest, folder: Path) -> dict[str, str]:
        return {**environment(question, folder), SETTINGS: json.dumps(_here.settings)}

    fork_server.COMMAND = (sys.executable, "-P", str(WORKER))  # type: ignore[assignment]
    compiler._environment = with_settings


def _keep_scheduled(scheduled: str) -> Module:
    if "\nENTRY" not in scheduled or not scheduled.rstrip().endswith("\n}"):
        raise Truncated
    _here.scheduled = scheduled
    return parse(scheduled)


def predict(run: Run) -> dict[str, Any]:
    started = time.perf_counter()
    _here.settings = own_settings(run)
    row: dict[str, Any] = {"name": run.name, "slice": run.slice, "job": job_hash(run), "libtpu": version("libtpu")}
    row |= {"flags": run.flags.label if run.flags else "forerun's own"}
    try:
        try:
            answer = compiler.ask(run.question(), threading.Event(), lambda phase: None)
        except Truncated:
            return predict(run)
    except (UserError, compiler.CompilerFailure) as error:
        return {**row, "fits": None, "failure": str(error)[:500]}
    row |= {"fits": answer.fits, "program": answer.program, "mesh": answer.mesh}
    row |= {"hbm_peak_bytes": answer.memory.peak_bytes, "flops_per_step": answer.flops_per_step}
    row |= {"compile_seconds": round(time.perf_counter() - started, 1)}
    if answer.step:
        CACHE.mkdir(parents=True, exist_ok=True)
        scheduled_path(run).write_bytes(gzip.compress(_here.scheduled.encode(), 3))
        row |= {"seconds": answer.step.mid_seconds, "parts_seconds": dict(answer.step.parts_seconds)}
        row |= {"recomputed_by_compiler": recomputed_by_compiler(_here.scheduled)}
    return row


def record(row: dict[str, Any]) -> None:
    with _writing, RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row["name"], row.get("failure", ""), "" if row["fits"] else "does not fit", file=sys.stderr, flush=True)


def main(names: list[str]) -> int:
    compiler.parse = _keep_scheduled  # type: ignore
    use_own_server()
    known = recorded()
    all_runs = [variant for run in runs() for variant in run.variants()]
    wanted = [run for run in all_runs if not is_current(run, known.get(job_hash(run)))]
    wanted = [run for run in wanted if not names or any(name in run.name for name in names)]
    wanted.sort(key=lambda run: run.generation == "tpu7x")  # last, because each takes minutes
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda run: record(predict(run)), wanted))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
