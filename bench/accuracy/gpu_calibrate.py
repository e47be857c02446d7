"""Calibrate the step-time model of GPUs: a few factors per generation, from the calibration half.

python bench/accuracy/gpu_calibrate.py    # needs the programs of gpu_predict.py; prints factors for gpu_model.py

The method is that of calibrate.py. Runs whose program differs from the published one in work are excluded: those that
did not fit, and those that the compiler recomputes for lack of memory.
"""

from __future__ import annotations

import gzip
import math
import sys
from functools import partial

import numpy as np
from calibrate import fit
from gpu_predict import compiled, program_file
from gpu_runs import GENERATIONS, generation, half, halves, runs
from runs import Run

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import Module, parse
from forerun.planner.time.gpu.gpu_model import assumed_gpu
from forerun.planner.time.gpu.gpu_simulation import GpuSimulation

# Standard deviations of log(factor) before any run is known. Microbenchmarks give gemms, attention and HBM; latencies
# and the bandwidth that collectives reach beside other kernels are less certain.
PRIOR = {"gemm": 0.08, "attention": 0.15, "hbm": 0.15, "link": 0.25, "overhead": 0.4}

Programs = list[tuple[Run, Module]]


def seconds(run: Run, module: Module, factors: np.ndarray) -> float:
    machine = slice_named(run.slice)
    shares = {name: math.exp(value) for name, value in zip(PRIOR, factors, strict=True)}
    model = assumed_gpu(machine.chip, machine.devices // machine.hosts).with_shares(**shares)
    return GpuSimulation(module, model).run().seconds


def errors(programs: Programs, factors: np.ndarray) -> list[float]:
    return [math.log(seconds(run, module, factors) / run.seconds) for run, module in programs]


def calibration_half() -> Programs:
    all_runs = runs()
    half_of = halves(all_runs)
    found = []
    for run in all_runs:
        known = compiled(run) if half(run, half_of) == "calibration" else None
        if known is not None and known["fits"] and not known["recomputed_by_compiler"]:
            found.append((run, parse(gzip.decompress(program_file(run).read_bytes()).decode())))
    return found


def main() -> int:
    programs = calibration_half()
    for name in GENERATIONS:
        chosen = [(run, module) for run, module in programs if generation(run) == name]
        if not chosen:
            continue
        factors = fit(partial(errors, chosen), PRIOR)
        print(name, len(chosen), {n: round(math.exp(f), 3) for n, f in zip(PRIOR, factors, strict=True)})
        for (run, _), before, after in zip(chosen, errors(chosen, 0 * factors), errors(chosen, factors), strict=True):
            print(f"  {run.name:44} {math.expm1(before):+.1%} -> {math.expm1(after):+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
