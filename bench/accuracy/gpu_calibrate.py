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
from forerun.planner.time.gpu.gpu_model import RATES, assumed_gpu
from forerun.planner.time.gpu.gpu_simulation import GpuSimulation

# Standard deviations of log(factor) before any run is known. Microbenchmarks give gemms, attention and HBM, but in
# training the clock depends on the power limit. Latencies and the bandwidth of collectives are less certain.
PRIOR = {"gemm": 0.12, "attention": 0.15, "hbm": 0.15, "link": 0.25, "overhead": 0.4}
# The largest shares of the data sheet that microbenchmarks reach: factors beyond them are limited after the fit. B200:
# 1822 TFLOP/s of a GB200. RTX 4090: its clock is above that of the data sheet.
MOST_GEMM = {"a100": 0.87, "hopper": 0.80, "b200": 0.81, "4090": 1.0}
MOST_HBM = 0.94

Programs = list[tuple[Run, Module]]


def seconds(run: Run, module: Module, factors: np.ndarray) -> float:
    machine = slice_named(run.slice)
    shares = {name: math.exp(value) for name, value in zip(PRIOR, factors, strict=True)}
    model = assumed_gpu(machine.chip, machine.devices // machine.hosts).with_shares(**shares)
    return GpuSimulation(module, model).run().seconds


def errors(programs: Programs, factors: np.ndarray) -> list[float]:
    return [math.log(seconds(run, module, factors) / run.seconds) for run, module in programs]


def limited(run: Run, factors: np.ndarray) -> np.ndarray:
    """Return the factors, at most what brings a rate to that of the best microbenchmark."""
    assumed = RATES[slice_named(run.slice).chip.name]
    most = {"gemm": MOST_GEMM[generation(run)] / assumed.gemm, "hbm": MOST_HBM / assumed.hbm}
    return np.minimum(factors, [math.log(most.get(name, math.inf)) for name in PRIOR])


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
        factors = limited(chosen[0][0], fit(partial(errors, chosen), PRIOR))
        print(name, len(chosen), {n: round(math.exp(f), 3) for n, f in zip(PRIOR, factors, strict=True)})
        for (run, _), before, after in zip(chosen, errors(chosen, 0 * factors), errors(chosen, factors), strict=True):
            print(f"  {run.name:44} {math.expm1(before):+.1%} -> {math.expm1(after):+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
