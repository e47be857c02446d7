"""Hostile checkpoints: each is refused by name, runs nothing, and costs no more than twice its bytes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import Bomb, Case, build

ALLOWANCE_BYTES = 32 << 20
# Reading these makes millions of allocations, and tracing each of them takes ten times as long as the reading itself.
# A process of its own reads them, and its resident memory is measured instead.
MANY_ALLOCATIONS = {"all the tensors allowed, then a fault", "index without end"}
READER = """
import json, sys, tracemalloc
from pathlib import Path
from forerun.errors import UserError
from forerun.hub.safetensors import open_weights

def status_bytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])

def refusal(folder):
    try:
        open_weights(Path(folder)).close()
    except UserError as error:
        return str(error)
    except BaseException as error:
        return f"NOT A USER ERROR: {error!r}"

def traced(folder):
    tracemalloc.start()
    said = refusal(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"said": said, "peak": peak}

def resident(folder):
    before = status_bytes("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak, VmHWM, to the present value
    said = refusal(folder)
    return {"said": said, "peak": status_bytes("VmHWM:") - before}

refusal("/nowhere")  # imports what a refusal needs
for folder in json.load(sys.stdin):
    print(json.dumps((traced if sys.argv[1] == "traced" else resident)(folder)))
"""


def read(how: str, cases: list[Case]) -> list[tuple[Case, str | None, int]]:
    """Read these cases in one process: each with the error and the most memory that reading it took."""
    source = str(Path(__file__).resolve().parents[3] / "src")
    ran = subprocess.run(
        [sys.executable, "-c", READER, how],
        input=json.dumps([str(case.folder) for case in cases]),
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return [(case, line["said"], line["peak"]) for case, line in zip(cases, lines, strict=True)]


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marker") / "executed"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, marker: Path) -> list[tuple[Case, str | None, int]]:
    """Every case with its error and the most memory that reading it took."""
    cases = build(tmp_path_factory.mktemp("hostile"), marker)
    large = [case for case in cases if case.name in MANY_ALLOCATIONS]
    assert len(large) == len(MANY_ALLOCATIONS)
    results = read("traced", [case for case in cases if case.name not in MANY_ALLOCATIONS])
    return results + [line for case in large for line in read("resident", [case])]


def test_every_case_is_refused_and_names_its_fault(told: list[tuple[Case, str | None, int]]) -> None:
    wrong = {case.name: (case.word, said) for case, said, _ in told if not said or case.word not in said}
    assert wrong == {}
    assert [case.name for case, said, _ in told if said and "NOT A USER ERROR" in said] == []
    unnamed = [case.name for case, said, _ in told if said and str(case.folder) not in said]
    assert unnamed == [], "the refusal names the file"


def test_no_refusal_can_write_to_the_terminal(told: list[tuple[Case, str | None, int]]) -> None:
    assert [case.name for case, said, _ in told if said and not said.replace("\n", "").isprintable()] == []


def test_nothing_is_executed(told: list[tuple[Case, str | None, int]], marker: Path) -> None:
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.is_dir(), "the payload itself works"


def test_memory_is_bounded_by_the_file(told: list[tuple[Case, str | None, int]]) -> None:
    bounds = {case.name: (peak, 2 * case.file_bytes + ALLOWANCE_BYTES) for case, _, peak in told}
    assert {name: both for name, both in bounds.items() if both[0] > both[1]} == {}


def test_the_corpus_is_large(told: list[tuple[Case, str | None, int]], capsys: pytest.CaptureFixture[str]) -> None:
    worst = max(told, key=lambda line: line[2] - 2 * line[0].file_bytes)
    with capsys.disabled():
        beyond = max(0, worst[2] - 2 * worst[0].file_bytes) / (1 << 20)
        print(f"\nhostile files: {len(told)} refused; memory beyond twice the file: {beyond:.1f} MiB ({worst[0].name})")
    assert len(told) >= 45
    assert len({case.name for case, _, _ in told}) == len(told)
