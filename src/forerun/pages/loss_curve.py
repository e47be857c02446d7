"""The loss of a run as a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.pages.svg import Plot, Scale

MAX_POINTS = 400
SIZE = (680, 260)

Points = Sequence[tuple[float, float]]


def loss_curve(losses: Points, validation: Points = ()) -> Plot:
    """Return the chart of (step, loss) points, with the validation losses as dots.

    A long run is thinned to `MAX_POINTS` means, so that the page stays small.
    """
    line = thinned([(step, loss) for step, loss in losses if math.isfinite(loss)])
    shown = [loss for _, loss in (*line, *validation)]
    low, high = min(shown), max(shown)
    space = max(0.08 * (high - low), 1e-3)
    first, last = line[0][0], max(line[-1][0], line[0][0] + 1)
    plot = Plot(SIZE, Scale(first, last), Scale(low - space, high + space), "loss by step")
    steps = sorted({first, round((first + last) / 2), last})
    plot.x_axis({step: f"{step:,}" for step in steps}, "step")
    plot.y_axis({value: f"{value:.3g}" for value in (low, (low + high) / 2, high)}, "loss")
    plot.line(line, "front")
    for step, loss in validation:
        plot.point(step, loss, "c2", f"validation, step {step:,}: {loss:.4f}")
    return plot


def thinned(points: Points) -> Points:
    """Return at most `MAX_POINTS` means of successive points."""
    size = max(1, -(-len(points) // MAX_POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]
