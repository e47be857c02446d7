"""A sample of `storage_rig.py`: one trial of a kind, which says itself whether what must hold did.

Trials of the clock and of trackers are not among them: under libfaketime a start takes more than a minute, and trackers
are compared by the time of a step. `matrix.py` runs them; the results are in docs/explanation/faults.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import bucket_trials
import lock_trials
import pytest
from needs import need

pytestmark = pytest.mark.timing


def assert_ok(trial: Callable[[str, int], dict[str, Any]], kind: str, seed: int = 0) -> None:
    about = trial(kind, seed)
    assert about["ok"], about


def test_a_bucket_that_loses_answers_resets_uploads_refuses_and_hangs() -> None:
    for package in ("gcp_storage_emulator", "gcsfs"):
        need(importlib.util.find_spec(package), package)
    assert_ok(bucket_trials.trial, "tour")


@pytest.mark.parametrize("kind", lock_trials.KINDS)
def test_the_lock_of_a_tpu(kind: str) -> None:
    for seed in range(2):
        assert_ok(lock_trials.trial, kind, seed)
