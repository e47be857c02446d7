"""The page of failure modes names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "explanation" / "cloud-failures.md"


def test_every_failure_has_a_test_that_exists() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| `([\w/]+\.py)::(\w+)` \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 31))
    missing = [
        f"{number}: {file}::{name}"
        for number, file, name in rows
        if not (TESTS / file).exists() or f"def {name}(" not in (TESTS / file).read_text("utf-8")
    ]
    assert missing == []
