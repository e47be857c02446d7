"""The rows in trackio's database, read with SQLite."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def trackio_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the only run in a database, in the order of their arrival. A new database has none."""
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as database:
            found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    except sqlite3.OperationalError:  # the client has not created the tables yet
        return []
    assert len({name for name, _, _ in found}) <= 1
    return [{"step": step, **json.loads(metrics)} for _, step, metrics in found]
