"""The batch of a run that may continue with fewer slices."""

from __future__ import annotations

from typing import Any

import pytest
from error_assertions import assert_error

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.resolve.derive import Derived, derive


def derived(slices: int, **fields: Any) -> Derived:
    given: dict[str, Any] = {
        "model": {"layers": 1, "embed": 8, "heads": 1},
        "data": "unread",
        "steps": 4,
        "batch": 24,
        "mesh": {"slices": 3, "min_slices": 2},
    }
    return derive(Job.model_validate(given | fields), MeshShape(1, 2, 1, slices=slices), None)


def test_micro_batches_have_the_same_size_on_fewer_slices() -> None:
    """Each of six devices has 4 rows, each of four has 6: the largest common micro-batch has 2."""
    found = {slices: derived(slices) for slices in (2, 3)}
    assert {slices: one.micro_batch for slices, one in found.items()} == {2: 2, 3: 2}
    assert {slices: one.accumulation for slices, one in found.items()} == {2: 3, 3: 2}
    assert ("slices", "2 to 3") in [row[:2] for row in found[3].rows()]


def test_without_the_key_the_micro_batch_is_the_share_of_a_device() -> None:
    assert derived(3, mesh={"slices": 3}).micro_batch == 4


@pytest.mark.parametrize(("batch", "fix"), [(18, "batch=12 or batch=24"), (6, "batch=12, or")])
def test_a_batch_that_does_not_divide_is_rejected_while_all_slices_take_part(batch: int, fix: str) -> None:
    """So the user knows it before the run starts."""
    with pytest.raises(UserError) as caught:
        derived(3, batch=batch)
    assert_error(caught.value, "E-PROGRAM-020", what="2 of 3 slices", fix=fix)


def test_a_micro_batch_that_does_not_divide_is_rejected() -> None:
    with pytest.raises(UserError) as caught:
        derived(3, micro_batch=4)
    assert_error(caught.value, "E-PROGRAM-021", what="6 sequences", fix="micro_batch=2")
