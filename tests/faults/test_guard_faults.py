from __future__ import annotations

import pytest
from rig import rig_lines

pytestmark = pytest.mark.timing


def test_three_faults_leave_no_trace_but_what_the_ledger_says() -> None:
    *results, summary = rig_lines("guard_rig.py", "3")
    assert [result["kind"] for result in results] == ["nan once", "nan tied killed", "spike tied"]
    assert (summary["trials"], summary["exact"]) == (3, 3)
    assert results[1]["kill_at"] is not None
    assert results[2]["left_out"]
