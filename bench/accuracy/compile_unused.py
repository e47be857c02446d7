"""Compile the unused published TPU runs and store the scheduled programs. It predicts nothing: open_sealed.py does.

python bench/accuracy/compile_unused.py [--side sealed|development] [--own-options] [--again] [name ...]

Each run is compiled with the flags of its framework; a run whose flags are not certain also with the other flags, and
with --own-options also with forerun's own. The programs are stored outside the repository (FORERUN_ACCURACY_CACHE, or
~/.cache/forerun/accuracy), each with a JSON file about its compile. Runs that are stored already are skipped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import predict
from more_runs import DEVELOPMENT, SEALED, side_of, unused_runs
from predict import CACHE, job_hash, own_settings, recomputed_by_compiler, scheduled_path
from runs import Run

from forerun.errors import UserError
from forerun.planner.compile import compiler
from forerun.planner.time.step_time import StepTime


def compile_file(run: Run) -> Path:
    """Return the JSON file about the compile of a run. The scheduled program is next to it."""
    return CACHE / f"unused-{job_hash(run)}-{version('libtpu')}.json"


def compiled(run: Run) -> dict[str, Any] | None:
    """Return what is known about the compile of a run, or None if it was not compiled yet."""
    path = compile_file(run)
    return json.loads(path.read_text()) if path.exists() else None


def variants(run: Run, own_options: bool = False) -> list[Run]:
    """Return the run with each of its possible flags, and as forerun compiles it if it is asked for."""
    return [*run.variants(), run.as_forerun_compiles()] if own_options else run.variants()


def _no_prediction(*_: Any, **__: Any) -> StepTime | None:
    return None


def compile_run(run: Run) -> dict[str, Any]:
    """Compile a run, and store its program if it fits."""
    started = time.perf_counter()
    predict._here.settings = own_settings(run)
    row: dict[str, Any] = {"name": run.name, "slice": run.slice, "job": job_hash(run), "libtpu": version("libtpu")}
    row |= {"flags": run.flags.source if run.flags else "forerun's own"}
    try:
        answer = compiler.ask(run.question(), threading.Event(), lambda phase: None)
    except predict.Truncated:
        return compile_run(run)
    except (UserError, compiler.CompilerFailure) as error:
        return {**row, "fits": None, "failure": str(error)[:500]}
    text = predict._here.scheduled
    row |= {"fits": answer.fits, "program": answer.program, "mesh": answer.mesh}
    row |= {"hbm_peak_bytes": answer.memory.peak_bytes, "flops_per_step": answer.flops_per_step}
    row |= {"recomputed_by_compiler": recomputed_by_compiler(text)}
    row |= {"compile_seconds": round(time.perf_counter() - started, 1)}
    if answer.fits:
        scheduled_path(run).write_bytes(gzip.compress(text.encode(), 3))
    return row


def store(run: Run, row: dict[str, Any]) -> None:
    compile_file(run).write_text(json.dumps(row))
    print(
        f"{run.name:34} {'run' if run.flags else 'own'} fits {row['fits']} "
        f"{row.get('hbm_peak_bytes', 0) / 2**30:6.1f} GiB {row.get('compile_seconds', 0):5.0f} s "
        f"recomputes {row.get('recomputed_by_compiler')} {row.get('failure', '')}",
        flush=True,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=(SEALED, DEVELOPMENT))
    parser.add_argument("--own-options", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    CACHE.mkdir(parents=True, exist_ok=True)
    compiler.parse = predict._keep_scheduled  # type: ignore[attr-defined, assignment]
    compiler.step_time = _no_prediction  # type: ignore[attr-defined, assignment]
    predict.use_own_server()
    side = side_of()
    wanted = [run for run in unused_runs() if given.side in (None, side[run.family])]
    wanted = [run for run in wanted if not given.names or any(name in run.name for name in given.names)]
    # Those that take minutes are last.
    wanted.sort(
        key=lambda run: (run.generation == "tpu7x") + (run.generation == "v4") + 2 * run.job.get("unroll", False)
    )
    each = [variants(run, given.own_options) for run in wanted]
    first, others = [found[0] for found in each], [other for found in each for other in found[1:]]
    for run in (*first, *others):
        if given.again or not compile_file(run).exists():
            store(run, compile_run(run))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
