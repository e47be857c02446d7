"""Predictions for candidates that are not compiled, from the compiled ones of the same slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.config.schema import Remat
from forerun.planner.search.regression import CandidatePosition, Deviations, Estimate, Regression
from forerun.planner.search.space import Candidate, Space

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
