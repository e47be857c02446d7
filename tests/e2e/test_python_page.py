"""The examples of docs/how-to/python.md, executed. tests/e2e/test_notebooks.py executes the notebooks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 60


@pytest.mark.aot
@pytest.mark.timeout(1200)
def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "how-to" / "python.md").read_text("utf-8"), re.M | re.S
    )
    assert len(blocks) >= 8
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "alice.txt").write_text(TEXT)
    (tmp_path / "job.yaml").write_text("model: {layers: 1, embed: 16, heads: 2}\ndata: texts\nsteps: 1\n")
    (tmp_path / "page.py").write_text("\n".join(blocks))
    ran = subprocess.run(
        [sys.executable, "-P", "page.py"], cwd=tmp_path, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "True v6e-1" in ran.stdout
    assert "E-JOB-" in ran.stdout
    assert (tmp_path / "small-hf" / "model.safetensors").is_file()
