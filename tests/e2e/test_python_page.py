"""The examples of docs/how-to/python.md and of the notebook, executed."""

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


@pytest.mark.aot
@pytest.mark.timeout(1200)
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(ROOT / "examples" / "notebook" / "first_steps.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    job, plan, bar, run, metrics = pages
    assert "sequence" in job
    assert "v6e-1" in plan
    assert "<iframe" in plan
    assert 'value="200" max="200"' in bar
    assert "&lt;svg" in run
    assert "loss" in metrics
    texts = [output.data["text/plain"] for output in outputs if "text/plain" in output.get("data", {})]
    by_hand, first = map(float, texts[-2].strip("()").split(", "))
    assert by_hand == first
    assert len(texts[-1]) > 20
    if folder := os.environ.get("FORERUN_KEEP_NOTEBOOK"):
        nbformat.write(notebook, Path(folder) / "executed.ipynb")
