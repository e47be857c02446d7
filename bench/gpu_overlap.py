"""What options of XLA's GPU compiler change: the time of collectives that is not hidden, and the peak memory.

    python bench/gpu_overlap.py [MACHINE ...]       # needs jax's CUDA plugin, no GPU; about 15 s per line when idle

Each line is one compile of a job with one set of options. The times are predictions of `plan`, which simulates the
scheduled program; nothing runs. `seconds` is the time until the compiler's memory report, with imports. Results are
written to bench/results/gpu_overlap.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest
from forerun.program.compiler_options import compiler_options
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB, MIB

RESULTS = Path(__file__).parent / "results" / "gpu_overlap.json"
MACHINES = ("h100-8", "h100-8x2", "a100-80-8", "b200-8")
# The compiler runs in a child process, which takes its options from this variable.
VARIABLE = "FORERUN_BENCH_GPU_OPTIONS"
PATCH = f"""
import json, os
if os.environ.get({VARIABLE!r}):
    from forerun.program import build, compiler_options
    options = compiler_options.CompilerOptions(json.loads(os.environ[{VARIABLE!r}]))
    build.compiler_options = lambda *layout: options
"""
PLAIN = {"xla_gpu_enable_triton_gemm": False}
SCHEDULER = PLAIN | {"xla_gpu_enable_latency_hiding_scheduler": True}
PIPELINED = {f"xla_gpu_enable_pipelined_{kind}": True for kind in ("all_gather", "reduce_scatter", "all_reduce")}
SETS: dict[str, dict[str, Any]] = {
    "defaults of XLA": PLAIN,
    "scheduler": SCHEDULER,
    "forerun": dict(compiler_options("gpu", "", MeshShape(1, 8, 1)).values),
    "forerun, pipelined": compiler_options("gpu", "", MeshShape(1, 8, 1)).values | PIPELINED,
    # NVIDIA/JAX-Toolbox, docs/frameworks/maxtext/README.md, July 2026
    "recipe for MaxText": SCHEDULER
    | PIPELINED
    | {
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": 1024 * MIB,
        "xla_gpu_all_gather_combine_threshold_bytes": 1024 * MIB,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 * MIB,
    },
}
SHAPES = {
    "8 layers of 4096": {"layers": 8, "embed": 4096, "heads": 32, "head_dim": 128, "vocab": 32000},
    "8 layers of 1024": {"layers": 8, "embed": 1024, "heads": 16, "head_dim": 64, "vocab": 32000},
}


def job_of(shape: str, devices: int) -> Job:
    """Return a job with 8,192 tokens per device and step."""
    small = SHAPES[shape]["embed"] == 1024
    sequence, micro_batch = (1024, 8) if small else (4096, 2)
    return Job.model_validate(
        {
            "model": SHAPES[shape],
            "data": "nothing",
            "sequence": sequence,
            "batch": devices * micro_batch,
            "micro_batch": micro_batch,
            "steps": 10,
            "attention": "xla",
            "remat": "full" if small else "dots",
        }
    )


def measured(machine: str, shape: str, name: str) -> dict[str, Any]:
    """Return the line of one compile."""
    os.environ[VARIABLE] = json.dumps(SETS[name])
    target = slice_named(machine)
    question = CompileRequest(ResolvedJob(job_of(shape, target.devices)), target)
    started = time.monotonic()
    answer = compiler.ask(question, threading.Event(), lambda phase: None)
    assert answer.step is not None
    hidden = ("collectives not hidden", "network not hidden")
    return {
        "machine": machine,
        "job": shape,
        "options": name,
        "step_ms": round(answer.step.mid_seconds * 1e3, 1),
        "not_hidden_ms": round(sum(answer.step.parts_seconds.get(part, 0.0) for part in hidden) * 1e3, 1),
        "peak_gib": round(answer.memory.peak_bytes / GIB, 2),
        "seconds": round(time.monotonic() - started, 1),
    }


def main(machines: list[str]) -> None:
    """Print a line per compile, and write all lines."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(PATCH)
        sys.path.insert(0, folder)  # the child's PYTHONPATH is this process's path
        for machine in machines or MACHINES:
            for shape in SHAPES:
                for name in SETS:
                    lines.append(measured(machine, shape, name))
                    print(json.dumps(lines[-1]), flush=True)
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
