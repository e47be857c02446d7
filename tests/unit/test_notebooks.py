"""The format of the notebooks. tests/e2e/test_notebooks.py executes them."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BY_NAME = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
MAX_COLUMNS = 120


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_of(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def test_all_notebooks_exist() -> None:
    names = {"custom_model", "kaggle_tpu_v5e_8", "lora_colab_tpu", "plan_and_search", "quickstart", "reading_a_run"}
    assert {path.stem for path in NOTEBOOKS} == names


@BY_NAME
def test_the_format_is_valid_and_has_no_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for cell in code_of(path):
        assert cell.outputs == []
        assert cell.execution_count is None


@BY_NAME
def test_the_first_code_cell_upgrades_and_the_second_has_the_settings(path: Path) -> None:
    install, settings = code_of(path)[:2]
    assert install.id == "install"
    assert settings.metadata.tags == ["parameters"]
    assert sum("parameters" in cell.metadata.get("tags", ()) for cell in code_of(path)) == 1


def test_the_first_cell_is_the_same_in_all_notebooks() -> None:
    assert len({code_of(path)[0].source for path in NOTEBOOKS}) == 1


def test_the_first_cell_works_without_forerun() -> None:
    """Its imports at the top are of the standard library; forerun is imported in a `try`, or after the installation."""
    body = ast.parse(code_of(NOTEBOOKS[0])[0].source).body
    first_try = next(n for n, node in enumerate(body) if isinstance(node, ast.Try))
    before = [node for node in body[:first_try] if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in before}
    assert names == {"importlib", "importlib.metadata", "os", "shutil", "subprocess", "sys", "pathlib"}


@BY_NAME
def test_links_to_other_files_exist(path: Path) -> None:
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    for text in texts:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
            assert (path.parent / target).exists(), target
        for name in re.findall(r"`(\w+\.ipynb)`", text):
            assert (path.parent / name).exists(), name


@BY_NAME
def test_lines_fit_the_page(path: Path) -> None:
    lines = [line for cell in read(path).cells for line in cell.source.splitlines()]
    assert [line for line in lines if len(line) > MAX_COLUMNS and "](" not in line] == []


def test_the_script_has_nothing_to_change() -> None:
    assert subprocess.run([sys.executable, ROOT / "scripts" / "notebooks", "--check"], check=False).returncode == 0


def test_the_script_writes_the_address_of_a_repository(tmp_path: Path) -> None:
    for name in ("notebooks", "docs/how-to", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    script = [sys.executable, tmp_path / "scripts" / "notebooks", "--repository", "https://github.com/example/fork"]
    subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
    for path in (tmp_path / "notebooks").glob("*.ipynb"):
        assert 'SOURCE = "git+https://github.com/example/fork"' in code_of(path)[0].source
    page = (tmp_path / "docs" / "how-to" / "notebooks.md").read_text("utf-8")
    place = "example/fork/blob/main/notebooks"
    assert f"(https://colab.research.google.com/github/{place}/quickstart.ipynb)" in page
    assert f"(https://www.kaggle.com/kernels/welcome?src=https://github.com/{place}/kaggle_tpu_v5e_8.ipynb)" in page
    assert subprocess.run(script, check=True, capture_output=True).stdout == b"", "the second time changes nothing"


def test_the_page_names_every_notebook() -> None:
    page = (ROOT / "docs" / "how-to" / "notebooks.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+)\.ipynb`", page, re.M)) == {path.stem for path in NOTEBOOKS}
