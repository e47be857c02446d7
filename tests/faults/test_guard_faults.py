from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timing

SCRIPT = Path(__file__).resolve().parent / "guard_rig.py"


def test_three_faults_leave_no_trace_but_what_the_ledger_says() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "3"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *results, summary = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [result["kind"] for result in results] == ["nan once", "nan tied killed", "spike tied"]
    assert (summary["trials"], summary["exact"]) == (3, 3)
    assert results[1]["kill_at"] is not None
    assert results[2]["left_out"]
