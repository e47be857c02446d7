"""The cost of an attempt and its limits, against numbers computed by hand."""

import pytest

from forerun.cloud.control.billing import attempt_usd, is_useful, least_usd, limit_seconds


@pytest.mark.parametrize(
    ("ready_at", "end_at", "preempted", "usd"),
    [
        (None, 7200.0, False, 0.0),
        (3600.0, 7200.0, False, 36.0),
        (3600.0, 3660.0, True, 0.0),  # preempted in its first minute
        (3600.0, 3661.0, True, 0.61),
        (3600.0, 3660.0, False, 0.6),
        (3600.0, 3000.0, False, 0.0),
    ],
)
def test_an_attempt_is_billed_while_it_is_ready(
    ready_at: float | None, end_at: float, preempted: bool, usd: float
) -> None:
    assert attempt_usd(36.0, ready_at, end_at, preempted=preempted) == pytest.approx(usd)


@pytest.mark.parametrize(
    ("max_usd", "spent_usd", "usd_per_hour", "seconds"),
    [
        (40.0, 0.0, 36.0, 4000),
        (40.0, 39.0, 36.0, 100),
        (40.0, 41.0, 36.0, 0),
        (None, 5.0, 36.0, None),
        (40.0, 0.0, 0.0, None),
        (1.0, 0.0, 7.0, 514),  # 514.28
    ],
)
def test_the_limit_is_the_rest_of_the_budget(
    max_usd: float | None, spent_usd: float, usd_per_hour: float, seconds: int | None
) -> None:
    assert limit_seconds(max_usd, spent_usd, usd_per_hour) == seconds


def test_an_attempt_without_time_to_train_is_not_started() -> None:
    assert not is_useful(limit_seconds(0.99 * least_usd(36.0), 0.0, 36.0))
    assert is_useful(limit_seconds(least_usd(36.0), 0.0, 36.0))
    assert is_useful(None)
