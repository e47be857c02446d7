"""These programs run for milliseconds, on many meshes: LLVM's optimizations would be most of the time.

Makes what the tests of this folder share importable, and lets them write the rows of tables in the docs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def families_table() -> Callable[[str, str, Any], None]:
    """(row, column, value) for docs/reference/families.md, in the folder FORERUN_TABLES; without it, nothing."""

    def note(row: str, column: str, value: Any) -> None:
        if folder := os.environ.get("FORERUN_TABLES"):
            worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
            Path(folder).mkdir(parents=True, exist_ok=True)
            with (Path(folder) / f"families-{worker}.jsonl").open("a") as file:
                file.write(json.dumps({"row": row, "column": column, "value": value}) + "\n")

    return note
