"""A sample of `data_rig.py`: training from token stores in buckets equals training from a local store, bit for bit.

The complete matrix is `python tests/faults/matrix.py --only "data clean" --only "data faults" ...`, with its results in
docs/explanation/data-scale.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from data_buckets import HOSTS, Case, DataBuckets, damage_of, unreported
from faulty_proxy import KINDS

pytestmark = pytest.mark.timing


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataBuckets]:
    with DataBuckets(tmp_path_factory.mktemp("data") / "bench") as found:
        yield found


@pytest.mark.parametrize(
    "case",
    [
        Case("gcs", 1, cache=False, faults=True),
        Case("s3", HOSTS, cache=True, faults=True, deleted=True),
    ],
    ids=lambda case: case.name,
)
def test_faults_of_a_bucket_change_no_loss_and_are_reported(buckets: DataBuckets, case: Case) -> None:
    expected = buckets.reference(case.hosts)
    found = buckets.trained(case)
    assert expected.differs_in(found.outcome) == []
    assert set(found.injected_by_kind()) == set(KINDS), "more steps are necessary for all kinds of faults"
    assert unreported(case, found) == [], found.injected_by_kind()
    assert f"{buckets.emulator(case.place).bucket}/tokens/{buckets.store.name}" in found.said


def test_a_unit_that_is_damaged_in_the_bucket_is_rejected_by_name(buckets: DataBuckets) -> None:
    buckets.reference(1)
    about = damage_of(buckets, Case("gcs"))
    assert about["ok"], about
