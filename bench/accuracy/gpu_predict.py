"""Compile the published GPU runs and store the scheduled programs. It predicts nothing: gpu_evaluate.py does.

python bench/accuracy/gpu_predict.py --half calibration [name ...]    # also held-out, "not counted"; needs no GPU

The programs are stored outside the repository (FORERUN_ACCURACY_CACHE, or ~/.cache/forerun/accuracy), each with a JSON
file about its compile. Runs that are stored already are skipped; --again compiles them again.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_runs import half, halves, runs, variants
from predict import CACHE, recomputed_by_compiler
from runs import Run

from forerun.errors import UserError
from forerun.planner.compile import compiler, fork_server
from forerun.planner.hlo import Module, parse
from forerun.planner.time.step_time import StepTime

PLUGIN = "jax-cuda13-plugin"
WORKER = Path(__file__).resolve().parent / "gpu_worker.py"
_texts: list[str] = []


def compile_file(run: Run) -> Path:
    """Return the JSON file about the compile of a run. The scheduled program is next to it."""
    digest = hashlib.sha256(f"{run.name} {json.dumps(run.job, sort_keys=True)}".encode()).hexdigest()[:12]
    return CACHE / f"gpu-{digest}-{version(PLUGIN)}.json"


def program_file(run: Run) -> Path:
    return compile_file(run).with_suffix(".hlo.gz")


def compiled(run: Run) -> dict[str, Any] | None:
    """Return what is known about the compile of a run, or None if it was not compiled yet."""
    path = compile_file(run)
    return json.loads(path.read_text()) if path.exists() else None


def _keep_text(text: str) -> Module:
    _texts.append(text)
    return parse(text)


def _no_prediction(*_: Any, **__: Any) -> StepTime | None:
    return None


def compile_run(run: Run) -> dict[str, Any]:
    """Compile a run; if it does not fit and recomputes nothing, compile it with recomputation of cheap operations."""
    row: dict[str, Any] = {}
    for variant in variants(run):
        row = _compile(variant)
        if row["fits"] or row["fits"] is None:
            break
    return row


def _compile(run: Run) -> dict[str, Any]:
    started = time.perf_counter()
    row: dict[str, Any] = {"name": run.name, "slice": run.slice, "compiler": f"{PLUGIN} {version(PLUGIN)}"}
    row |= {"remat": run.job["remat"]}
    _texts.clear()
    try:
        answer = compiler.ask(run.question(), threading.Event(), lambda phase: None)
    except (UserError, compiler.CompilerFailure) as error:
        return {**row, "fits": None, "failure": str(error)[:500]}
    text = _texts[-1]
    row |= {"fits": answer.fits, "program": answer.program, "mesh": answer.mesh}
    row |= {"peak_bytes": answer.memory.peak_bytes, "flops_per_step": answer.flops_per_step}
    row |= {"recomputed_by_compiler": recomputed_by_compiler(text)}
    row |= {"cudnn_attention": text.count("__cudnn$fmha"), "compile_seconds": round(time.perf_counter() - started, 1)}
    row["text"] = text
    return row


def store(run: Run, row: dict[str, Any]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    if "text" in row:
        program_file(run).write_bytes(gzip.compress(row.pop("text").encode(), 3))
    compile_file(run).write_text(json.dumps(row))
    print(
        f"{run.name:34} fits {row['fits']} {row.get('peak_bytes', 0) / 2**30:6.1f} GiB "
        f"{row.get('compile_seconds', 0):5.0f} s fmha {row.get('cudnn_attention')} {row.get('failure', '')}",
        flush=True,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", default="calibration")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    compiler.parse = _keep_text  # type: ignore[attr-defined, assignment]
    compiler.step_time = _no_prediction  # type: ignore[attr-defined, assignment]
    fork_server.COMMAND = (sys.executable, "-P", str(WORKER))  # type: ignore[assignment]
    half_of = halves(runs())
    for run in runs():
        wanted = half(run, half_of) == given.half and (not given.names or any(name in run.name for name in given.names))
        if wanted and (given.again or not compile_file(run).exists()):
            store(run, compile_run(run))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
