"""Line charts: points, axes and labels, and curves that stay small."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.pages.line_chart import Curve, Mark, line_chart, round_ticks, tick_text, time_text, time_ticks, value_text
from forerun.pages.svg import downsample

VALUES = st.lists(st.floats(-1e6, 1e6), max_size=400)


@given(VALUES, st.integers(4, 60))
def test_a_short_curve_keeps_its_extremes_its_ends_and_its_order(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    kept = downsample(points, most)
    assert len(kept) <= max(most, 0)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert set(kept) <= set(points)
    if points:
        assert kept[0] == points[0]
        assert kept[-1] == points[-1]
        assert min(y for _, y in kept) == min(values)
        assert max(y for _, y in kept) == max(values)
    if len(points) <= most:
        assert kept == points


@given(st.floats(-1e5, 1e5), st.floats(1e-4, 1e6), st.sampled_from(["number", "percent", "rate", "bytes"]))
def test_ticks_are_few_inside_and_at_equal_distances(low: float, span: float, kind: str) -> None:
    ticks = [value for value, _ in round_ticks(low, low + span, kind)]
    assert 1 <= len(ticks) <= 6
    slack = 1e-6 * max(span, abs(low))
    assert all(low - slack <= value <= low + span + slack for value in ticks)
    distances = [b - a for a, b in itertools.pairwise(ticks)]
    assert all(math.isclose(one, distances[0], rel_tol=1e-6, abs_tol=1e-9) for one in distances)


def test_labels() -> None:
    assert [text for _, text in round_ticks(0, 0.003, "number")] == ["0", "0.001", "0.002", "0.003"]
    assert [text for _, text in round_ticks(1, 300, "step", 7, whole=True)] == ["50", "100", "150", "200", "250", "300"]
    assert [text for _, text in round_ticks(1, 3, "step", whole=True)] == ["1", "2", "3"]
    assert [text for _, text in time_ticks(0, 7200, 4)] == ["0 s", "30 min", "1 h", "1 h 30 min", "2 h"][::1]


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.1234, "percent", "12.3 %"),
        (1536, "bytes", "1.50 KiB"),
        (12_345, "rate", "12.3k"),
        (3.0003e-4, "number", "3e-4"),
        (2.91774, "number", "2.918"),
        (12_345, "step", "12,345"),
        (0.25, "seconds", "250 ms"),
    ],
)
def test_texts_of_values(value: float, kind: str, text: str) -> None:
    assert value_text(value, kind) == text


def test_texts_of_ticks_and_times() -> None:
    assert tick_text(200_000, 100_000, "step") == "200k"
    assert tick_text(0.5, 0.25, "percent") == "50 %"
    assert tick_text(1e-5, 1e-5, "number") == "1e-5"
    assert [time_text(s) for s in (59, 60, 3660, 90_000)] == ["59 s", "1 min", "1 h 1 min", "1 d 1 h"]


def test_points_and_marks_are_placed_by_the_axes() -> None:
    chart = line_chart("Loss", [Curve("loss", [(0, 0.0), (50, 5.0), (100, 10.0)])], marks=[Mark(25, "skip", "25")])
    assert chart is not None
    assert chart.marks == ((0.25, "skip", "25"),)
    xs = [int(place.split()[0]) for place in chart.curves[0].path[1:].split("L")]
    assert xs == [0, 50_000, 100_000]
    assert chart.latest == "10"
    assert chart.y.share(chart.y.high) == 1


def test_a_large_range_has_a_logarithmic_axis() -> None:
    chart = line_chart("Gradient norm", [Curve("norm", [(1, 0.1), (2, 1.0), (3, 10.0)])])
    assert chart is not None
    assert chart.y.log
    assert chart.y.share(1.0) == pytest.approx(0.5)


def test_values_above_the_top_are_drawn_at_the_top() -> None:
    chart = line_chart("Loss", [Curve("loss", [(1, 5.0), (2, 1e6), (3, 4.0)])], top=10.0, log=False)
    assert chart is not None
    assert chart.y.high < 11
    assert chart.curves[0].path.split("L")[1].split()[1] == "0"


@pytest.mark.parametrize("points", [[(7, 3.0)], [(1, 3.0), (2, 3.0)], [(1, 0.0), (2, 0.0)]])
def test_one_point_and_equal_points_are_a_chart(points: list[tuple[float, float]]) -> None:
    chart = line_chart("Loss", [Curve("loss", points)])
    assert chart is not None
    assert all(0 <= share <= 1 for share, _ in chart.y.ticks)


def test_no_finite_point_is_no_chart() -> None:
    assert line_chart("Loss", [Curve("loss", [(1, math.nan), (2, math.inf)])]) is None
