"""CI runs at least one test of every capability."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import ci_capabilities
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_ci_runs_a_test_of_every_capability() -> None:
    uncovered = {
        name: tests
        for name, tests in ci_capabilities.capabilities().items()
        if not any(map(ci_capabilities.runs_in_ci, tests))
    }
    assert uncovered == {}


def test_every_row_of_the_tables_is_a_capability() -> None:
    """The names come from the published tables, not from the modules that `capabilities` reads."""
    docs, names = ROOT / "docs", set(ci_capabilities.capabilities())
    done = re.findall(r"^(S\d\.\d+):\n(?:  .*\n)*?  tests:", (docs / "reference" / "features.yaml").read_text(), re.M)
    assert len(done) > 100
    table = (docs / "reference" / "families.md").read_text().partition("<!-- end of families -->")[0]
    families = re.findall(r"^\| ((?!family|---)[^|]+?) \|", table, re.M)
    assert len(families) > 30
    matrix = ast.parse((ROOT / "tests" / "faults" / "matrix.py").read_text())
    faults = {
        ("hosts " if ast.unparse(call.func) == "hosts" else "") + call.args[0].value
        for call in ast.walk(matrix)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("Fault", "hosts")
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(faults) > 20
    expected = (
        {f"feature {row}" for row in done} | {f"family {row}" for row in families} | {f"fault {row}" for row in faults}
    )
    assert expected - names == set()


def missing(tests: Iterable[str]) -> list[str]:
    """Return the tests without a function of their name in their file."""
    functions = {test: ci_capabilities.function_of(test).rpartition("::")[2] for test in tests}
    texts = {file: (ROOT / file).read_text("utf-8") for file in set(map(ci_capabilities.file_of, functions))}
    return [test for test, name in functions.items() if f"def {name}(" not in texts[ci_capabilities.file_of(test)]]


def test_every_named_test_exists() -> None:
    assert missing(test for tests in ci_capabilities.capabilities().values() for test in tests) == []


def test_every_kept_test_exists() -> None:
    """`bench/ci_sample.py` also finds renamed cases, but it needs the recorded seconds of all tests."""
    module = ast.parse((ROOT / "bench" / "ci_sample.py").read_text("utf-8"))
    [keep] = [
        node.value for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KEEP"
    ]
    assert missing(ast.literal_eval(keep)) == []


@pytest.mark.parametrize(
    ("test", "runs"),
    [
        ("tests/unit/test_ci_capabilities.py::test_every_named_test_exists", True),
        ("tests/faults/test_nodes.py::test_two_nodes_train_as_one_machine", False),  # slow by its module
        ("tests/faults/test_slices.py::test_a_lost_slice_is_restored_to_the_bit", False),  # slow by its decorator
    ],
)
def test_markers_in_the_source_are_found(test: str, runs: bool) -> None:
    assert ci_capabilities.runs_in_ci(test) == runs


def test_listed_tests_and_functions_do_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = "tests/unit/test_ci_capabilities.py"
    listed = tmp_path / "list.tsv"
    listed.write_text(f"# header\n1.0\t{file}::test_a[x]\n1.0\t{file}::test_b\n1.0\t{file}::test_c\tpy313\n")
    monkeypatch.setattr(ci_capabilities, "LIST", listed)
    ci_capabilities.omitted.cache_clear()
    runs = {
        name: ci_capabilities.runs_in_ci(f"{file}::{name}")
        for name in ("test_a[x]", "test_a", "test_b", "test_b[y]", "test_c")
    }
    ci_capabilities.omitted.cache_clear()
    assert runs == {"test_a[x]": False, "test_a": True, "test_b": False, "test_b[y]": False, "test_c": True}
