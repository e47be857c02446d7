"""Cost of the guard: time and memory of a step with it relative to one without, and time of a replica check.

    python bench/guard.py here       # a minute or two on two idle cores
    python bench/guard.py tpu        # needs libtpu, no TPU: minutes of compiling

Both steps belong to one job and run alternately in one process (plain, guarded, guarded, plain, ...), so that other
load on the machine affects both equally. A replica check (guard.compare_every) is timed alternately with the step, on
eight virtual devices that each hold the complete state. It is reported as a share of the steps between two checks.
Memory is the compiler's figure, for this machine and for the quickstart on one TPU v6e. The latter also has the step
time that `plan` predicts. Each part writes its figures into bench/results/guard.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import numpy as np

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import step_time
from forerun.program import step as step_module
from forerun.program.build import Program, build, make_mesh
from forerun.program.fingerprint import compiled_fingerprints
from forerun.resolve.derive import derive
from forerun.resolve.resolve_model import resolve_model

ROUNDS, STEPS, BETWEEN_LOOKS = 12, 2, 100
HERE = {
    "model": {"layers": 4, "embed": 256, "heads": 4, "vocab": 2048},
    "data": "unread",
    "sequence": 128,
    "batch": 16,
    "steps": 100,
    "precision": {"compute": "float32"},
    "remat": "none",
}
QUICKSTART = {
    "model": {"layers": 4, "embed": 128, "heads": 4, "vocab": 257},
    "data": "unread",
    "sequence": 128,
    "batch": 16,
    "steps": 200,
    "precision": {"compute": "float32"},
    "remat": "none",
}


def built(fields: dict[str, Any], devices: Any, shape: MeshShape) -> Program:
    resolved = resolve_model(Job.model_validate(fields))
    return build(resolved, make_mesh(shape, devices), derive(resolved.job, shape, None))


def compiled(program: Program, guarded: bool = True) -> Any:
    """Return the compiled step. Without the guard, it takes every step and only carries the guard's state along."""
    decide = step_module.guarded
    if not guarded:
        step_module.guarded = lambda rule, before, after, metrics: (after, metrics)
    try:
        return program.trace().lower().compile(compiler_options=program.compiler_options or None)
    finally:
        step_module.guarded = decide


def memory_bytes(executable: Any) -> dict[str, int]:
    figures = executable.memory_analysis()
    return {
        "temporary": figures.temp_size_in_bytes,
        "given_away": figures.alias_size_in_bytes,
        "peak": figures.peak_memory_in_bytes,
    }


def pair(fields: dict[str, Any], devices: Any, shape: MeshShape) -> dict[bool, tuple[Program, Any]]:
    steps = {}
    for guarded in (False, True):
        program = built(fields, devices, shape)  # a new function, because jax caches the trace of the other one
        steps[guarded] = (program, compiled(program, guarded))
    return steps


def memory(steps: dict[bool, tuple[Program, Any]]) -> dict[str, Any]:
    plain, guarded = (memory_bytes(steps[with_guard][1]) for with_guard in (False, True))
    return {"plain_bytes": plain, "guarded_bytes": guarded}


def batch_for(program: Program) -> Any:
    batch = jax.tree.map(lambda like: jax.device_put(np.ones(like.shape, like.dtype), like.sharding), program.batch)
    return batch, program.placed_schedule()


def timed(executable: Any, state: Any, batch: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    for _ in range(STEPS):
        state, metrics = executable(state, *batch)
    jax.block_until_ready((state, metrics))
    return (time.perf_counter() - began) / STEPS, state


def time_ratio(steps: dict[bool, tuple[Program, Any]]) -> dict[str, float]:
    batch = batch_for(steps[True][0])
    states = {guarded: steps[guarded][0].initial_state(0) for guarded in steps}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(ROUNDS + 1):
        for guarded in (False, True) if number % 2 else (True, False):
            took, states[guarded] = timed(steps[guarded][1], states[guarded], batch)
            if number:
                seconds[guarded].append(took)
    pairs = [guarded / plain for plain, guarded in zip(seconds[False], seconds[True], strict=True)]
    return {
        "plain_seconds": statistics.median(seconds[False]),
        "median_of_ratios": statistics.median(pairs),
        "ratio_of_fastest": min(seconds[True]) / min(seconds[False]),
    }


def replica_check_cost() -> dict[str, float]:
    """Time a replica check alternately with a step, on eight copies of the state."""
    program = built(HERE, jax.devices()[:8], MeshShape(8, 1, 1))
    step, look = compiled(program), compiled_fingerprints(program.mesh, program.state)
    state, batch = program.initial_state(0), batch_for(program)
    steps, looks = [], []
    for number in range(ROUNDS + 1):
        took, state = timed(step, state, batch)
        began = time.perf_counter()
        jax.block_until_ready(look(state))
        if number:
            steps.append(took)
            looks.append(time.perf_counter() - began)
    shares = [one / (BETWEEN_LOOKS * other) for one, other in zip(looks, steps, strict=True)]
    return {
        "step_seconds": statistics.median(steps),
        "look_seconds": statistics.median(looks),
        "share_at_100": statistics.median(shares),
        "worst_share_at_100": max(shares),
        "temporary_bytes": look.memory_analysis().temp_size_in_bytes,
    }


def on_tpu() -> dict[str, Any]:
    from jax.experimental import topologies

    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    jax.config.update("jax_enable_compilation_cache", False)
    one = topologies.get_topology_desc(platform="tpu", topology_name="v6e:1x1", chips_per_host_bounds=(1, 1, 1)).devices
    steps = pair(QUICKSTART, one, MeshShape(1, 1, 1))
    predicted = {
        f"{said}_predicted_seconds": step_time(parse(steps[guarded][1].as_text()), slice_named("v6e-1")).mid_seconds
        for guarded, said in ((False, "plain"), (True, "guarded"))
    }
    return {**memory(steps), **predicted}


def here() -> dict[str, Any]:
    steps = pair(HERE, jax.devices()[:1], MeshShape(1, 1, 1))
    return {**memory(steps), **time_ratio(steps), "look": replica_check_cost()}


def main() -> None:
    out = Path(__file__).parent / "results" / "guard.json"
    results = json.loads(out.read_text()) if out.exists() else {}
    results |= {"jax": jax.__version__}
    if "here" in sys.argv[1:]:
        results["here"] = here()
    if "tpu" in sys.argv[1:]:
        results["v6e-1 quickstart"] = on_tpu()
    print(json.dumps(results, indent=2))
    out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
