"""Calibrate the step-time model: one factor per generation and part of the machine, from the development runs.

python bench/accuracy/calibrate.py      # needs the cache of predict.py; prints factors for planner/time/chip_model.py

The fit is least squares on log(predicted / published), with a prior on each factor, so a factor changes only if the
runs give evidence for it. Programs in which the compiler recomputes for lack of HBM differ from the measured ones and
are excluded. The method is Gauss-Newton with finite differences. Nothing else is fitted.

Each run is printed with three errors: without factors, with them, and with factors from the other families of its
generation. Factors are worth having only if the last ones are smaller than the first.
"""

from __future__ import annotations

import gzip
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from more_runs import development_runs
from predict import recomputed_by_compiler, scheduled_path
from runs import Run, runs

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.prediction import tpu_simulation

# Standard deviations of log(factor) before any run is known: matmuls are known from dumped code, links and hosts from
# data sheets. NOISE is the standard deviation of the log(error) that the model cannot explain.
PRIOR = {"matmul": 0.08, "hbm": 0.15, "link": 0.2, "host": 0.3, "attention": 0.15}
NOISE = 0.10  # two published times of one program differ by as much
FAR = 2.0  # runs with an error of more than FAR x NOISE count less (Huber)
TURNS, STEP = 4, 0.02
LEAST_RUNS = 3


@dataclass(frozen=True)
class Slopes:
    """A published run: log(predicted / published) without factors, and its change with log(factor) of each part."""

    run: Run
    error: float
    slopes: np.ndarray

    def error_with(self, factors: np.ndarray) -> float:
        return self.error + float(self.slopes @ factors)


def slopes_of(run: Run) -> Slopes:
    """Simulate a run with and without a small factor for each part. Larger factors are extrapolated."""
    module, slice = parse(gzip.decompress(scheduled_path(run).read_bytes()).decode()), slice_named(run.slice)
    simulation, machine = tpu_simulation(module, slice), chip_model_of(slice.chip)

    def log_error(**shares: float) -> float:
        return math.log(simulation.on(machine.with_shares(**shares)).run().seconds / run.seconds)

    error = log_error()
    slopes = [(log_error(**{part: math.exp(STEP)}) - error) / STEP for part in PRIOR]
    return Slopes(run, error, np.array(slopes))


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


def factors_of(chosen: Sequence[Slopes]) -> np.ndarray:
    """Return log(factor) of each part from some runs of a generation. Fewer than three runs give no factors."""
    if len(chosen) < LEAST_RUNS:
        return np.zeros(len(PRIOR))
    return fit(lambda factors: [one.error_with(factors) for one in chosen])


def left_out(found: Sequence[Slopes]) -> list[float]:
    """Return the errors of all runs, each with the factors that the other families of its generation give."""
    return [
        one.error_with(factors_of([other for other in found if other.run.family != one.run.family])) for one in found
    ]


def summary(errors: Sequence[float]) -> str:
    sizes = [abs(math.expm1(error)) for error in errors]
    return f"median {statistics.median(sizes):.1%}, mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}"


def main() -> int:
    chosen = [run for run in (*runs(), *development_runs()) if not run.unlike and scheduled_path(run).exists()]
    found = [slopes_of(run) for run in chosen if not recomputed(run)]
    before: list[float] = []
    after: list[float] = []
    for generation in sorted({one.run.generation for one in found}):
        some = [one for one in found if one.run.generation == generation]
        factors = factors_of(some)
        print(generation, len(some), {n: round(math.exp(f), 3) for n, f in zip(PRIOR, factors, strict=True)})
        alone = left_out(some)
        for one, error in zip(some, alone, strict=True):
            values = (one.error, one.error_with(factors), error)
            print(f"  {one.run.name:48} " + " -> ".join(f"{math.expm1(value):+7.1%}" for value in values))
        before, after = [*before, *(one.error for one in some)], [*after, *alone]
    print("without factors:", summary(before))
    print("with factors from the other families:", summary(after))
    return 0


def recomputed(run: Run) -> bool:
    return recomputed_by_compiler(gzip.decompress(scheduled_path(run).read_bytes()).decode()) > 0


if __name__ == "__main__":
    sys.exit(main())
