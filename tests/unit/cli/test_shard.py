from __future__ import annotations

import pytest

from forerun.cli.data import shard_of
from forerun.errors import UserError


def slurm(task: int, least: int, most: int, count: int, step: int | None = None) -> dict[str, str]:
    """The variables that sbatch sets in a task of an array."""
    values = {"ID": task, "MIN": least, "MAX": most, "COUNT": count}
    values |= {} if step is None else {"STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("text", "environment", "wanted"),
    [
        ("2/4", {}, (2, 4)),
        ("2/4", slurm(7, 0, 9, 10), (2, 4)),  # a share that the user names has priority
        ("auto", slurm(7, 0, 9, 10), (7, 10)),
        ("auto", slurm(1, 1, 4, 4, step=1), (0, 4)),
        ("auto", slurm(6, 2, 6, 3, step=2), (2, 3)),
        ("auto/10", slurm(3, 3, 5, 2), (3, 10)),  # single tasks again
        ("auto", {"JOB_COMPLETION_INDEX": "4", "JOB_COMPLETIONS": "5"}, (4, 5)),
        ("auto/5", {"JOB_COMPLETION_INDEX": "4"}, (4, 5)),
    ],
)
def test_a_share_is_named_or_given_by_the_scheduler(
    text: str, environment: dict[str, str], wanted: tuple[int, int]
) -> None:
    assert shard_of(text, environment) == wanted


def test_the_tasks_of_an_array_have_all_shares() -> None:
    assert [shard_of("auto", slurm(task, 5, 20, 6, step=3)) for task in range(5, 21, 3)] == [(n, 6) for n in range(6)]


@pytest.mark.parametrize(
    ("text", "environment", "code"),
    [
        ("auto/0", slurm(0, 0, 0, 1), "E-COMMAND-008"),
        ("auto/x", {}, "E-COMMAND-008"),
        ("automatic", {}, "E-COMMAND-008"),
        ("auto", {}, "E-COMMAND-090"),
        ("auto", slurm(0, 0, 1, 2) | {"JOB_COMPLETION_INDEX": "0"}, "E-COMMAND-090"),
        ("auto/10", slurm(10, 1, 10, 10), "E-COMMAND-091"),
        ("auto", {"JOB_COMPLETION_INDEX": "5", "JOB_COMPLETIONS": "5"}, "E-COMMAND-091"),
        ("auto", slurm(7, 0, 7, 5), "E-COMMAND-092"),
        ("auto", slurm(3, 0, 4, 3, step=2), "E-COMMAND-092"),
        ("auto", {"JOB_COMPLETION_INDEX": "4"}, "E-COMMAND-093"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "4"}, "E-COMMAND-094"),
        ("auto/5", {"JOB_COMPLETION_INDEX": "four"}, "E-COMMAND-094"),
    ],
)
def test_a_share_that_is_not_known_is_an_error(text: str, environment: dict[str, str], code: str) -> None:
    with pytest.raises(UserError) as caught:
        shard_of(text, environment)
    assert caught.value.code == code
