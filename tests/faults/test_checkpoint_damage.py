from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))
from checkpoint_damage import is_right, trials


def test_fifty_damages_are_found_told_and_passed_over(capfd: pytest.CaptureFixture[str]) -> None:
    results = list(trials(50))
    assert len({result["kind"] for result in results}) == 5
    assert len({result["file"] for result in results}) > 5
    assert [result for result in results if not is_right(result)] == []
    assert capfd.readouterr() == ("", ""), "what is damaged is not even parsed"
