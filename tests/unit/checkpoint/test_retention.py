from __future__ import annotations

from forerun.checkpoint.log import Commit
from forerun.checkpoint.store import Retention


def kept(retention: Retention, *steps: int, losses: tuple[object, ...] = ()) -> list[int]:
    records = [{"loss": loss} for loss in losses] or [{}] * len(steps)
    commits = [
        Commit(number, 1, step, str(step), {}, record)
        for number, (step, record) in enumerate(zip(steps, records, strict=True), 2)
    ]
    return [commit.step for commit in retention.kept(commits)]


def test_the_last() -> None:
    assert kept(Retention(2)) == []
    assert kept(Retention(2), 5) == [5]
    assert kept(Retention(2), 5, 10, 15) == [10, 15]


def test_every_so_many_steps() -> None:
    assert kept(Retention(1, every=10), 5, 10, 15, 20, 25) == [10, 20, 25]


def test_the_best_are_the_lowest_finite_figures_and_of_equal_ones_the_newer() -> None:
    losses = (2.0, 1.0, None, float("nan"), 1.0, "low", 3.0)
    assert kept(Retention(1, best=1), 1, 2, 3, 4, 5, 6, 7, losses=losses) == [5, 7]
    assert kept(Retention(1, best=3), 1, 2, 3, 4, 5, 6, 7, losses=losses) == [1, 2, 5, 7]
    assert kept(Retention(1, best=5), 1, 2, losses=(None, None)) == [2]


def test_another_figure() -> None:
    commits = [Commit(n, 1, n, "", {}, {"loss": n, "other": -n}) for n in (1, 2, 3)]
    assert [c.step for c in Retention(1, best=1, figure="loss").kept(commits)] == [1, 3]
    assert [c.step for c in Retention(1, best=1, figure="other").kept(commits)] == [3]


def test_what_lies_ahead_of_the_newest_goes() -> None:
    assert kept(Retention(3, every=10), 10, 20, 30, 20) == [10, 20]
    assert kept(Retention(3), 10, 20, 30, 40, 25) == [10, 20, 25]
