"""The regression through compiled results, against closed forms and the normal distribution of the standard library."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean

import pytest

from forerun.planner.search.regression import CandidatePosition, Deviations, Estimate, Regression

ERRORS = Deviations(overall=1.0, remat=0.3, micro_batch=0.2, mesh=0.1, joint=0.1, noise=0.05)
HERE, FAR = CandidatePosition((0.0,), (0.0,), (0.0, 0.0)), CandidatePosition((9.0,), (9.0,), (9.0, 9.0))


def test_without_results_the_formula_is_the_prediction_and_the_error_is_large() -> None:
    [found] = Regression(ERRORS, [], []).estimates([HERE], [3.0])
    assert found.mid == pytest.approx(3.0)
    assert found.deviation == pytest.approx(math.sqrt(1 + 0.09 + 0.04 + 0.01 + 0.01 + 0.0025))


def test_one_result_scales_all_predictions() -> None:
    """The closed form of one result: the mean is covariance / variance times the logarithm of its ratio."""
    near, far = Regression(ERRORS, [HERE], [2.0]).estimates([HERE, FAR], [3.0, 5.0])
    variance, signal, shared = 1.1525, 1.15, 1.0  # squares of: all deviations; all but noise; overall
    assert near.mid == pytest.approx(3 * 2 ** (signal / variance))
    assert far.mid == pytest.approx(5 * 2 ** (shared / variance))
    assert near.deviation == pytest.approx(math.sqrt(variance - signal**2 / variance))
    assert far.deviation == pytest.approx(math.sqrt(variance - shared**2 / variance))


def test_many_results_reproduce_a_smooth_error() -> None:
    """The formula is wrong by 2 to the power of half the position."""
    points = [CandidatePosition((0.0,), (x / 2,), (0.0, 0.0)) for x in range(9)]
    exact = Regression(Deviations(1.0, 0.3, 1.0, 0.1, 0.1, 0.001), points, [2 ** (x / 4) for x in range(9)])
    between = [CandidatePosition((0.0,), (x / 2 + 0.25,), (0.0, 0.0)) for x in range(8)]
    for x, found in enumerate(exact.estimates(between, [1.0] * 8)):
        assert found.mid == pytest.approx(2 ** ((x + 0.5) / 4), rel=0.01)
        assert found.deviation < 0.02


def test_estimates_follow_the_normal_distribution() -> None:
    found, normal = Estimate(math.log(4.0), 0.3), NormalDist(math.log(4.0), 0.3)
    assert found.mid == pytest.approx(4.0)
    assert found.low(1.5) == pytest.approx(4 * math.exp(-0.45))
    assert found.probability_below(5.0) == pytest.approx(normal.cdf(math.log(5.0)))
    assert found.probability_below(0.0) == 0.0
    dice = random.Random(0)
    gains = [max(0.0, math.log(3.5) - dice.gauss(normal.mean, normal.stdev)) for _ in range(100_000)]
    assert found.expected_gain(3.5) == pytest.approx(fmean(gains), rel=0.03)
