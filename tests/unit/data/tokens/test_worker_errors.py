"""What is reported when a tokenization worker fails: its own error, and memory only if the system killed it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from error_assertions import raises_error

from forerun.config.schema import Part
from forerun.data.source.sources import Source, open_source
from forerun.data.tokenizer import load_tokenizer
from forerun.data.tokens import worker_pool
from forerun.data.tokens.build import build
from forerun.data.tokens.recipe import Recipe, recipe_for
from forerun.errors import UserError

# A worker with a mistake in it, as a plug-in or a library could have one.
FAILS = """
import sys
from forerun.data.tokens import document, worker
from forerun.data.source.sources import Source
encode = document.Encoder.encode
def fails(self, rows):
    if any("row 7" in row.values["text"] for row in rows):
        raise ZeroDivisionError("no such thing")
    return encode(self, rows)
def does_not_open(cls, made):
    raise ZeroDivisionError("no such thing")
if sys.argv[1] == "row":
    document.Encoder.encode = fails
else:
    Source.from_json = classmethod(does_not_open)
worker.main()
"""


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "data").mkdir()
    text = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(1, 10))
    (tmp_path / "data" / "a.jsonl").write_text(text)
    return open_source(Part(path=str(tmp_path / "data")))


@pytest.fixture
def recipe() -> Recipe:
    return recipe_for(load_tokenizer("bytes"))


@pytest.mark.parametrize(("kind", "where"), [("row", "a.jsonl, line 7"), ("open", "a.jsonl")])
def test_an_error_of_python_is_reported_with_its_place(
    source: Source, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    monkeypatch.setattr(worker_pool, "WORKER", ("-c", FAILS, kind))
    with pytest.raises(RuntimeError) as caught:
        build(source, recipe, tmp_path / "s", workers=1)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "ZeroDivisionError: no such thing"
    assert where in second
    assert "memory" not in str(caught.value)


def test_a_worker_that_cannot_be_imported_is_not_short_of_memory(
    source: Source, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "WORKER", ("-c", "import no_such_module_of_forerun"))
    with raises_error("E-DATA-087", "a.jsonl") as caught:
        build(source, recipe, tmp_path / "s", workers=1)
    assert "module named 'no_such_module_of_forerun'" in caught.value.why
    assert "memory" not in caught.value.why + caught.value.fix


@pytest.mark.parametrize(("number", "memory"), [(9, True), (11, False)])
def test_only_a_killed_worker_may_be_short_of_memory(
    source: Source, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, memory: bool
) -> None:
    monkeypatch.setattr(worker_pool, "WORKER", ("-c", f"import os; os.kill(os.getpid(), {number})"))
    with pytest.raises(UserError) as caught:
        build(source, recipe, tmp_path / "s", workers=1)
    assert ("memory" in caught.value.fix) == memory
    assert f"signal {number}" in caught.value.why


def test_memory_that_runs_out_in_python_is_reported_as_that(
    source: Source, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = FAILS.replace("ZeroDivisionError", "MemoryError")
    monkeypatch.setattr(worker_pool, "WORKER", ("-c", program, "row"))
    with raises_error("E-DATA-099"):
        build(source, recipe, tmp_path / "s", workers=1)
