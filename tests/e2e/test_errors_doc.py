"""docs/reference/errors.md shows what is printed, to the letter."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOWN = re.compile(
    r"^## (?P<title>.+?)\n.*?^```bash\n(?P<command>.+?)\n```\n+```text\n(?P<text>.+?)\n```$", re.M | re.S
)
PAGE = [found.groupdict() for found in SHOWN.finditer((ROOT / "docs" / "reference" / "errors.md").read_text())]
NEEDS_LIBTPU = ("An absent TPU", "A job that does not fit")


def test_the_five_texts_are_there() -> None:
    titles = [entry["title"] for entry in PAGE]
    assert titles == ["A wrong key", "A wrong type", "An impossible mesh", *NEEDS_LIBTPU]


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry["title"], marks=pytest.mark.aot if entry["title"] in NEEDS_LIBTPU else ())
        for entry in PAGE
    ],
)
def test_the_text_is_printed_exactly(entry: dict[str, str], shell: dict[str, str]) -> None:
    """Without a terminal `plan` tells its progress on the same stream, above the error."""
    child = subprocess.run(["bash", "-c", entry["command"]], cwd=ROOT, env=shell, capture_output=True, text=True)
    assert child.returncode == 2, child.stderr
    above, _, error = child.stderr.partition("error: ")
    assert all(line.startswith(("v5e-1: ", "compiling changes")) for line in above.splitlines()), above
    assert f"error: {error}" == entry["text"] + "\n"
    assert "Traceback" not in child.stdout


def test_every_job_file_of_the_page_is_there_and_used() -> None:
    used = {word for entry in PAGE for word in entry["command"].split() if word.endswith(".yaml")}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "examples" / "errors").glob("*.yaml")}
    assert used == there
