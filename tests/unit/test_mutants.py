"""The table of mutants belongs to the present source, and `bench/mutants.py` notices what tests notice."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_mutants", ROOT / "bench" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_each_mutant_changes_the_present_source(bench: ModuleType) -> None:
    mutants = bench.read_table(ROOT / bench.TABLE)
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 60
    for mutant in mutants:
        original = (ROOT / "src" / "forerun" / mutant.file).read_text()
        changed = mutant.mutated(original)
        assert changed is not None, f"{mutant.name}: its text is not in {mutant.file} once"
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(original)), mutant.name
        for tests in mutant.tests:
            assert (ROOT / "tests" / tests).exists(), f"{mutant.name}: {tests}"


def test_each_mutant_has_a_result(bench: ModuleType) -> None:
    rows = bench.Record([], ROOT / bench.RECORD).rows
    for mutant in bench.read_table(ROOT / bench.TABLE):
        row = rows[mutant.name]
        assert row["file"] == mutant.file
        assert (row["result"] == bench.SURVIVED) == bool(mutant.equivalent), mutant.name


SOURCE = "def larger(a, b):\n    return max(a, b)  # as in the table\n\n\ndef zero(a):\n    return a * 0\n"
TESTS = (
    "from forerun import larger, zero\n\n\ndef test_larger():\n    assert larger(1, 2) == 2\n    assert zero(3) == 0\n"
)
TABLE = """
[[mutant]]
name = "smaller"
file = "__init__.py"
old = "max(a, b)"
new = "min(a, b)"
tests = ["test_larger.py"]

[[mutant]]
name = "other-zero"
file = "__init__.py"
old = "a * 0"
new = "a - a"
tests = ["test_larger.py"]
equivalent = "a - a is 0, too"

[[mutant]]
name = "old-text"
file = "__init__.py"
old = "sum(a, b)"
new = "min(a, b)"
tests = ["test_larger.py"]
"""


def test_results_of_a_small_repository(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, table, record = (tmp_path / name for name in ("src/forerun/__init__.py", bench.TABLE, bench.RECORD))
    for path, text in ((source, SOURCE), (tmp_path / "tests" / "test_larger.py", TESTS), (table, TABLE)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    record.parent.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    assert bench.main([], tmp_path) == 1
    rows = {row["name"]: row for row in map(json.loads, record.read_text().splitlines())}
    results = {name: row["result"] for name, row in rows.items()}
    assert results == {"smaller": "killed", "other-zero": "survived", "old-text": "stale"}
    assert rows["smaller"]["test"] == "tests/test_larger.py::test_larger"
    assert source.read_text() == SOURCE

    # Only what has changed runs again.
    table.write_text(TABLE.replace("sum(a, b)", "max(a, b)"))
    capsys.readouterr()
    assert bench.main([], tmp_path) == 0
    printed = capsys.readouterr().out
    assert "1 of 3" in printed
    assert "(100%); 1 equivalent" in printed
    first_record = record.read_text()
    assert bench.main([], tmp_path) == 0
    assert record.read_text() == first_record
