"""Draw docs/assets/schedules.svg: the learning rate of each schedule over a run of 1000 steps.

python bench/schedule_picture.py        # a second
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np

from forerun.config.optimizer import ScheduleName
from forerun.config.schema import Optimizer
from forerun.program.schedule import Schedule, rate_at

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "assets" / "schedules.svg"
STEPS, WARMUP = 1000, 50
WIDTH, HEIGHT, GAP, COLUMNS = 150, 70, 30, 4


def line(name: str) -> str:
    """Return the points of a schedule, with the learning rate 1 at the top."""
    optimizer = Optimizer(lr=1.0, schedule=name)  # type: ignore[arg-type]
    schedule = Schedule.of(optimizer, STEPS, WARMUP)
    points = []
    for step in range(0, STEPS, 5):
        rate = float(rate_at(name, schedule, np.int32(step), np))
        points.append(f"{step * WIDTH / STEPS:.4g},{HEIGHT * (1 - rate):.4g}")
    return " ".join(points)


def main() -> None:
    names = get_args(ScheduleName)
    rows = -(-len(names) // COLUMNS)
    parts = []
    for number, name in enumerate(names):
        x, y = GAP / 2 + number % COLUMNS * (WIDTH + GAP), GAP + number // COLUMNS * (HEIGHT + GAP + 8)
        parts.append(
            f'<g transform="translate({x:g} {y:g})"><text y="-6" class="name">{name}</text>'
            f'<path d="M0 0V{HEIGHT}H{WIDTH}" class="axis"/><polyline points="{line(name)}" class="rate"/></g>'
        )
    width, height = COLUMNS * (WIDTH + GAP), rows * (HEIGHT + GAP + 8) + GAP / 2
    style = (
        ".name{font:12px sans-serif;fill:#6e7781}.axis{fill:none;stroke:#8c959f}"
        ".rate{fill:none;stroke:#0969da;stroke-width:2}"
    )
    PICTURE.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="Learning rate of each schedule"><style>{style}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
