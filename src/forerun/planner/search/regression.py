"""A regression through a few compiled results, for predicting the others with an error (a Gaussian process).

Results are compared with an estimate by formula. The regression learns by which factor the formula is wrong, and how
the factor depends on remat, micro-batch and mesh. Candidates that resemble compiled ones get a small error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.config.schema import Remat
from forerun.planner.search.space import Candidate, Space

if TYPE_CHECKING:  # numpy is imported on first use: a plan without a search does not need it
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class CandidatePosition:
    """The position of a candidate: candidates with close positions have similar errors of the formula."""

    remat: tuple[float, ...]
    micro_batch: tuple[float, ...]
    mesh: tuple[float, ...]


@dataclass(frozen=True)
class Deviations:
    """How much the formula's error varies, as standard deviations of natural logarithms.

    Attributes:
      overall: of the factor that all candidates of a slice share.
      remat: between remat policies that are far apart.
      micro_batch: between micro-batches that are far apart.
      mesh: between meshes that are far apart.
      joint: between candidates, beyond the sum of these three.
      noise: between candidates at the same position.
    """

    overall: float
    remat: float
    micro_batch: float
    mesh: float
    joint: float
    noise: float

    @property
    def variance(self) -> float:
        """The variance of the error at one position, with noise."""
        parts = (self.overall, self.remat, self.micro_batch, self.mesh, self.joint, self.noise)
        return sum(part**2 for part in parts)

    def covariance(self, a: Sequence[CandidatePosition], b: Sequence[CandidatePosition]) -> NDArray[np.float64]:
        """Return the covariances of the formula's errors between two lists of positions, without noise."""
        import numpy as np

        remat = _squared_distances([one.remat for one in a], [one.remat for one in b])
        micro_batch = _squared_distances([one.micro_batch for one in a], [one.micro_batch for one in b])
        mesh = _squared_distances([one.mesh for one in a], [one.mesh for one in b])
        return (
            self.overall**2
            + self.remat**2 * np.exp(-remat / 2)
            + self.micro_batch**2 * np.exp(-micro_batch / 2)
            + self.mesh**2 * np.exp(-mesh / 2)
            + self.joint**2 * np.exp(-(remat + micro_batch + mesh) / 2)
        )


def _squared_distances(a: Sequence[tuple[float, ...]], b: Sequence[tuple[float, ...]]) -> NDArray[np.float64]:
    import numpy as np

    rows, columns = np.array(a, dtype=np.float64), np.array(b, dtype=np.float64)
    distances: NDArray[np.float64] = ((rows[:, None, :] - columns[None, :, :]) ** 2).sum(axis=-1)
    return distances


@dataclass(frozen=True)
class Estimate:
    """A predicted value with its error: the natural logarithm has this mean and standard deviation."""

    log_mean: float
    deviation: float

    @property
    def mid(self) -> float:
        """The median."""
        return math.exp(self.log_mean)

    def low(self, deviations: float) -> float:
        """Return the value that is `deviations` standard deviations below the middle."""
        return math.exp(self.log_mean - deviations * self.deviation)

    def probability_below(self, value: float) -> float:
        """Return the probability that the true value is below `value`."""
        return _normal_share((_log(value) - self.log_mean) / self.deviation)

    def expected_gain(self, value: float) -> float:
        """Return the expected improvement over `value`, as a share of it; no improvement counts as 0."""
        ahead = _log(value) - self.log_mean
        z = ahead / self.deviation
        return ahead * _normal_share(z) + self.deviation * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def _log(value: float) -> float:
    return math.log(max(value, 1e-300))


def _normal_share(z: float) -> float:
    """Return the share of a normal distribution below `z` standard deviations."""
    return math.erfc(-z / math.sqrt(2)) / 2


@dataclass(frozen=True)
class Regression:
    """The errors of a formula at compiled candidates: the ratios of result and formula at their positions."""

    deviations: Deviations
    points: Sequence[CandidatePosition]
    ratios: Sequence[float]

    def estimates(self, points: Sequence[CandidatePosition], formulas: Sequence[float]) -> list[Estimate]:
        """Return the predictions for positions where the formula has these values."""
        import numpy as np

        base = [_log(formula) for formula in formulas]
        if not self.points or not points:
            return [Estimate(value, math.sqrt(self.deviations.variance)) for value in base]
        noise = self.deviations.noise**2
        known = self.deviations.covariance(self.points, self.points) + noise * np.eye(len(self.points))
        between = self.deviations.covariance(self.points, points)
        solved = np.linalg.solve(known, between)
        means = np.array([_log(ratio) for ratio in self.ratios]) @ solved
        variances = np.maximum(self.deviations.variance - (between * solved).sum(axis=0), noise)
        return [
            Estimate(value + float(mean), math.sqrt(variance))
            for value, mean, variance in zip(base, means, variances, strict=True)
        ]


# How wrong the formulas are, fitted to the spaces of bench/results/search_quality.json and search_gpu.json (2026-11):
# the values with the highest likelihood, rounded.
TIME_ERROR = Deviations(overall=1.0, remat=0.25, micro_batch=0.2, mesh=0.1, joint=0.1, noise=0.01)
PEAK_ERROR = Deviations(overall=1.0, remat=0.2, micro_batch=0.05, mesh=0.15, joint=0.1, noise=0.01)
# Candidates at this distance are related loosely: shares of FLOPs and of saved activations, offload, doublings.
RECOMPUTED_LENGTH, KEPT_LENGTH, OFFLOAD_LENGTH = 0.2, 0.6, 2.0
MICRO_BATCH_LENGTH, MESH_LENGTH = 1.5, 1.0
NO_REMAT = Remat(policy="none")
FORWARD_SHARE = 1 / 3  # of the FLOPs of a forward and backward pass


@dataclass(frozen=True)
class StepModel:
    """The step time and peak memory of one slice's candidates, as learned from the compiled ones.

    Attributes:
      space: the space of the search.
      known_seconds: the step times of the slice's candidates that are compiled and fit.
      known_peaks: the peak bytes of the slice's candidates that are compiled.
    """

    space: Space
    known_seconds: Mapping[Candidate, float]
    known_peaks: Mapping[Candidate, int]

    def seconds(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Return the predicted step times of candidates."""
        return self._estimates(TIME_ERROR, self.known_seconds, self.space.guessed_seconds, candidates)

    def peak_bytes(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Return the predicted peaks of memory of candidates."""
        return self._estimates(PEAK_ERROR, self.known_peaks, self.space.guessed_bytes, candidates)

    def _estimates(
        self,
        errors: Deviations,
        known: Mapping[Candidate, float],
        formula: Callable[[Candidate], float],
        candidates: Sequence[Candidate],
    ) -> list[Estimate]:
        ratios = [value / formula(one) for one, value in known.items()]
        regression = Regression(errors, [self._point(one) for one in known], ratios)
        return regression.estimates([self._point(one) for one in candidates], [formula(one) for one in candidates])

    def _point(self, one: Candidate) -> CandidatePosition:
        mesh, (recomputed, kept) = one.mesh, self._shares(one)
        return CandidatePosition(
            (recomputed / RECOMPUTED_LENGTH, kept / KEPT_LENGTH, bool(one.remat.offload) / OFFLOAD_LENGTH),
            (math.log2(one.micro_batch) / MICRO_BATCH_LENGTH,),
            tuple(math.log2(axis) / MESH_LENGTH for axis in (mesh.data, mesh.fsdp, mesh.tp)),
        )

    def _shares(self, one: Candidate) -> tuple[float, float]:
        """Return the recomputed share of the FLOPs and the share of the activations that is kept in HBM."""
        sizes = self.space.sizes
        all_saved = sizes.saved_bytes(one.mesh, one.micro_batch, NO_REMAT)
        if not all_saved:  # a custom model: its activations are unknown
            return (0.0, 1.0) if one.remat.policy == NO_REMAT.policy else (FORWARD_SHARE, 0.0)
        recomputed = sizes.executed_flops(one.remat) / sizes.flops - 1
        return recomputed, sizes.saved_bytes(one.mesh, one.micro_batch, one.remat) / all_saved
