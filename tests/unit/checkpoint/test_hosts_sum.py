"""Sums of counts over hosts: exact beyond 32 bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from forerun.checkpoint.hosts import summed


def test_counts_of_three_hosts_are_added_without_loss_of_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"data_requests": 5, "data_read_bytes": 123_456_789_012_345, "data_damaged_blocks": 0}
    assert summed(here) == here
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda values: np.stack([values] * 3))
    assert summed(here) == {name: 3 * value for name, value in here.items()}
