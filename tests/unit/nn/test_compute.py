"""."""

from __future__ import annotations

import math

import pytest

from forerun.nn.compute import length_bucket


@pytest.mark.parametrize("shortest", [32, 64])
def test_buckets_hold_waste_little_and_are_few(shortest: int) -> None:
    found = {n: length_bucket(n, shortest) for n in range(1, 5000)}
    assert all(n <= bucket <= max(shortest, math.ceil(n * 1.5)) for n, bucket in found.items())
    steps = {shortest << power for power in range(9)} | {(shortest << power) * 3 // 2 for power in range(9)}
    assert set(found.values()) <= steps
    assert len(set(found.values())) <= 16
