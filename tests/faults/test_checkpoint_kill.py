from __future__ import annotations

import shutil
from typing import Any

import pytest
from needs import need
from rig import rig_lines

pytestmark = pytest.mark.timing


def lines(*arguments: str) -> list[dict[str, Any]]:
    return rig_lines("checkpoint_kill.py", *arguments)


def test_killed_at_random_moments_of_saving() -> None:
    *kills, summary = lines("random", "10")
    assert (len(kills), summary["survived"]) == (10, 10)
    assert summary["inside_a_save"] >= 5, "of every second it is made sure"
    assert kills[-1]["restored"] >= 8, "every third process commits two steps"


def test_killed_at_the_system_calls_that_make_a_checkpoint_count() -> None:
    need(shutil.which("strace"), "strace")
    *kills, summary = lines("syscalls", "rename", "link")
    assert summary["survived"] == len(kills) >= 2
    assert {kill["call"] for kill in kills} == {"rename", "link"}


def test_calls_that_fail_lose_nothing_and_are_told() -> None:
    *failures, summary = lines("errors", "writev", "rename", "link", "unlink")
    assert summary["survived"] == len(failures) == 14
    assert {failure["call"] for failure in failures if failure["told"]} >= {"writev", "rename", "link"}
