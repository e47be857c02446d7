from __future__ import annotations

import pytest

from forerun.data.early import windows
from forerun.data.early.windows import UnitRange, windows_of
from forerun.units import MIB


def ranges(sizes_mib: list[list[int]]) -> list[list[tuple[int, int, int]]]:
    found = windows_of(range(len(sizes_mib)), [[size * MIB for size in sizes] for sizes in sizes_mib])
    return [[(units.part, units.start, units.stop) for units in window] for window in found]


def test_the_first_windows_are_small_and_each_is_twice_the_one_before() -> None:
    found = ranges([[2] * 512])
    counts = [stop - start for ((_, start, stop),) in found]
    assert counts == [2, 4, 8, 16, 32, 64, 128, 128, 128, 2], "4 MiB, 8 MiB, ... 256 MiB, and the rest"
    assert [start for ((_, start, _),) in found] == [0, 2, 6, 14, 30, 62, 126, 254, 382, 510]


def test_a_unit_that_is_larger_than_a_window_is_a_window() -> None:
    assert ranges([[1024] * 3]) == [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)]]


def test_parts_are_used_at_the_same_pace_and_from_the_start() -> None:
    found = ranges([[2] * 40, [2] * 20, [2]])
    units = [(part, unit) for window in found for part, start, stop in window for unit in range(start, stop)]
    assert sorted(units) == [(p, u) for p, count in enumerate((40, 20, 1)) for u in range(count)]
    assert [part for part, _, _ in found[0]] == [0, 1, 2], "the first window has a unit of each part"
    used = [0, 0]
    for window in found:
        for part, _, stop in window:
            if part < 2:
                used[part] = stop
        assert abs(used[0] / 40 - used[1] / 20) <= 1 / 20


@pytest.mark.parametrize("sizes", [[[0]], [[0, 0]], [[5 * MIB]]])
def test_small_data_is_one_window(sizes: list[list[int]]) -> None:
    assert windows_of([3], sizes) == [(UnitRange(3, 0, len(sizes[0])),)]


def test_the_rule_names_the_sizes() -> None:
    """A change of the sizes changes the order, so it must change the identity of the data, too."""
    assert windows.RULE == "windows 4194304 x2 268435456"
