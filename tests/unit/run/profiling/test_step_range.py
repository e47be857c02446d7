from __future__ import annotations

import pytest

from forerun.errors import UserError
from forerun.run.profiling.step_range import StepRange, range_of


@pytest.mark.parametrize(("text", "first", "last"), [("10:15", 10, 15), ("7", 7, 7), ("1:1", 1, 1)])
def test_range(text: str, first: int, last: int) -> None:
    assert range_of(text) == StepRange(first, last)
    assert range_of(text).count == last - first + 1


@pytest.mark.parametrize("text", ["15:10", "0:3", "a:b", "-3:4", "3:", ":3", "1:2:3", "2.5:3"])
def test_mistakes(text: str) -> None:
    with pytest.raises(UserError) as caught:
        range_of(text)
    assert caught.value.code == "E-RUN-084"


def test_a_reversed_range_suggests_the_other_order() -> None:
    with pytest.raises(UserError) as caught:
        range_of("15:10")
    assert caught.value.fix == "--profile 10:15"


def test_beyond_the_last_step() -> None:
    StepRange(3, 6).require_reached(6)
    with pytest.raises(UserError) as caught:
        StepRange(10, 15).require_reached(12)
    assert caught.value.code == "E-RUN-085"
    assert caught.value.fix == "--profile 7:12"
