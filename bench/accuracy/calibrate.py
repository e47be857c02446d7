"""Calibrate the step-time model: one factor per generation and part of the machine, from the calibration half.

python bench/accuracy/calibrate.py      # needs the cache of predict.py; prints factors for planner/time/chip_model.py

The fit is least squares on log(predicted / published), with a prior on each factor, so a factor changes only if the
runs give evidence for it. Programs in which the compiler recomputes for lack of HBM differ from the measured ones and
are excluded. The method is Gauss-Newton with finite differences. Nothing else is fitted.
"""

from __future__ import annotations

import gzip
import math
import sys
from collections.abc import Callable, Mapping

import numpy as np
from predict import recorded, scheduled_path
from runs import Run, halves, runs

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import Module, parse
from forerun.planner.time.chip_model import assumed
from forerun.planner.time.collectives.torus import Torus
from forerun.planner.time.simulation import Simulation

# Standard deviations of log(factor) before any run is known: matmuls are known from dumped code, links and hosts from
# data sheets. NOISE is the standard deviation of the log(error) that the model cannot explain.
PRIOR = {"matmul": 0.08, "hbm": 0.15, "link": 0.2, "host": 0.3, "attention": 0.15}
NOISE = 0.10  # two published times of one program differ by as much
FAR = 2.0  # runs with an error of more than FAR x NOISE count less (Huber)
TURNS, STEP = 4, 0.02


def predicted(module: Module, run: Run, factors: np.ndarray) -> float:
    slice = slice_named(run.slice)
    shares = {name: math.exp(value) for name, value in zip(PRIOR, factors, strict=True)}
    return Simulation(module, assumed(slice.chip).with_shares(**shares), slice.chip.name, Torus.of(slice)).run().seconds


Predict = Callable[[np.ndarray], list[float]]  # log(factor) of each part -> log(predicted / published) of each run


def fit(predict: Predict, prior: Mapping[str, float] = PRIOR) -> np.ndarray:
    """Return log(factor) of each part of the machine: the most probable ones, given the runs and the prior."""
    widths = np.array(list(prior.values()))

    def residuals(factors: np.ndarray) -> np.ndarray:
        return np.array([*(error / NOISE for error in predict(factors)), *(factors / widths)])

    factors = np.zeros(len(prior))
    for _ in range(TURNS):
        now = residuals(factors)
        slopes = [(residuals(factors + STEP * unit) - now) / STEP for unit in np.eye(len(prior))]
        weights = np.sqrt(np.minimum(1.0, FAR / np.maximum(np.abs(now), 1e-9)))
        weights[-len(prior) :] = 1.0
        slope = np.stack(slopes, axis=1) * weights[:, None]
        factors = factors + np.linalg.lstsq(slope, -now * weights, rcond=None)[0]
    return factors


def main() -> int:
    all_runs, known = runs(), recorded()
    half_of = halves(all_runs)
    used = [run for run in all_runs if half_of[run.family] == "calibration" and not run.unlike]
    used = [
        run for run in used if known.get(run.name, {}).get("seconds") and not known[run.name]["recomputed_by_compiler"]
    ]
    for generation in sorted({run.generation for run in used}):
        modules = [
            (run, parse(gzip.decompress(scheduled_path(run).read_bytes()).decode()))
            for run in used
            if run.generation == generation
        ]
        factors = fit(
            lambda factors, chosen=modules: [
                math.log(predicted(module, run, factors) / run.seconds) for run, module in chosen
            ]
        )
        print(generation, len(modules), {n: round(math.exp(f), 3) for n, f in zip(PRIOR, factors, strict=True)})
        for run, module in modules:
            before, after = (predicted(module, run, f) / run.seconds - 1 for f in (0 * factors, factors))
            print(f"  {run.name:44} {before:+.1%} -> {after:+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
