"""The page of the guides' features: current, complete, and every test and section that it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROWS: dict[str, dict[str, Any]] = yaml.safe_load((DOCS / "reference" / "features.yaml").read_text())
FEATURES = (57, 52, 46, 54, 60)  # of each guide
STATES = {"tests", "reason", "planned"}
PLANNED = {"cloud runs", "notebooks", "trackers", "profiles", "streaming data", "GPU comparison"}


@cache
def anchors_in(file: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as the site makes them."""
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return frozenset(re.sub(r"[-\s]+", "-", heading) for heading in plain)


def test_the_page_is_that_of_the_data() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "features-page"), "--check"], check=False)
    assert done.returncode == 0, "run scripts/features-page"


def test_every_feature_is_there_once() -> None:
    expected = [f"S{guide}.{n}" for guide, count in enumerate(FEATURES) for n in range(1, count + 1)]
    assert list(ROWS) == expected
    text = (DOCS / "reference" / "features.yaml").read_text()
    assert len(re.findall(r"^S\d\.\d+:", text, flags=re.MULTILINE)) == len(expected), "an id is there twice"
    page = (DOCS / "reference" / "features.md").read_text()
    assert re.findall(r"^\| (S\d\.\d+) \|", page, flags=re.MULTILINE) == expected


def test_every_row_has_one_state_and_its_proof() -> None:
    for id, row in ROWS.items():
        assert row["feature"], id
        assert len(STATES & set(row)) == 1, id
        assert set(row) <= {"feature", *STATES, "docs"}, id
        assert ("docs" in row) == ("reason" in row), id
        assert row.get("tests") != [], id
        assert row.get("planned", "notebooks") in PLANNED, id


def test_every_named_section_exists() -> None:
    missing = []
    for id, row in ROWS.items():
        if "docs" in row:
            path, _, anchor = row["docs"].partition("#")
            if not (DOCS / path).is_file() or anchor not in anchors_in(DOCS / path):
                missing.append((id, row["docs"]))
    assert missing == []
