from __future__ import annotations

import math

from forerun.track.display.sparkline import ASCII, BLOCKS, Sparkline, blocks_for, sparkline


def drawn(values: list[float], width: int = 8) -> str:
    line = Sparkline(width)
    for value in values:
        line.add(value)
    return str(line)


def test_values_are_scaled_from_the_smallest_to_the_largest() -> None:
    assert drawn([]) == ""
    assert drawn([5.0, 5.0]) == "▁▁"
    assert drawn([float(v) for v in range(8)]) == BLOCKS
    assert drawn([2.0, math.nan, 1.0, math.inf]) == "█▁"


def test_a_long_course_keeps_its_shape_and_width() -> None:
    for count in (9, 15, 16, 17, 1000, 12345):
        down = drawn([float(-v) for v in range(count)])
        assert len(down) == 8
        assert list(down) == sorted(down, reverse=True)
        assert (down[0], down[-1]) == ("█", "▁")


def test_each_block_is_the_mean_of_its_part() -> None:
    assert drawn([0, 2, 0, 2, 7, 9, 7, 9] * 2, width=4) == "▁█▁█"


def test_a_curve_is_scaled_and_has_the_characters_of_the_terminal() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 7, 0, 0], 2) == "█▁"
    assert sparkline([1.0] * 5, 3) == "▁▁▁"
    assert sparkline([], 10) == ""
    assert sparkline([1, 2], 10, blocks_for("ascii")) == ASCII[0] + ASCII[-1]
