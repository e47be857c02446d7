"""A sample of the fault matrix on real runs, and the matrix and its table themselves."""

from __future__ import annotations

import json
from pathlib import Path

import matrix
import pytest
import table
from runs import Bench, Outcome
from runs_mesh import words
from runs_rig import WINDOWS, killed_run, phases, stopped

pytestmark = pytest.mark.timing

EVERY = 5


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults") / "bench", steps=40, every=EVERY)


@pytest.fixture(scope="module")
def expected(bench: Bench) -> Outcome:
    outcome = bench.reference()
    assert sorted(outcome.losses) == list(range(1, 41))
    assert len(set(outcome.losses.values())) > 35, "every step has a loss of its own"
    return outcome


def test_killed_twice_on_its_way_it_is_exact(bench: Bench, expected: Outcome) -> None:
    lines = killed_run(bench, expected, number=0, first=4, hits=2, held=True)  # in saves, under a supervisor
    assert [line["exact"] for line in lines] == [True, True]
    assert {line["moment"] for line in lines} == {"save"}
    assert all(line["inside_a_save"] for line in lines)
    assert all(line["lost_steps"] <= 2 * EVERY for line in lines)
    assert all(line["recovery_seconds"] > 0 for line in lines)


def test_stopped_in_steps_in_a_wait_for_data_and_in_a_compilation_it_is_exact(bench: Bench, expected: Outcome) -> None:
    with bench.run("stopped") as run:
        for window in ("steps", "waiting for data", "compile"):
            with bench.held_back(4, bench.steps, step_seconds=2.0):  # for a minute, should the signal be late
                line = stopped(bench, run, list(WINDOWS).index(window), grace=120)
            assert (line["code"], line["good"]) == (75, True), line
        run.start()
        run.finish()
        assert set(phases(run)) >= {"trace_seconds", "compile_seconds", "state_seconds"}
        assert run.outcome().differs_in(expected) == []


def test_what_is_not_the_same_is_not_exact(expected: Outcome) -> None:
    other = Outcome({**expected.losses, 7: (0.5).hex()}, expected.state, "")
    assert other.differs_in(expected) == ["losses", "ledger"]


def test_an_impossible_mesh_is_one_line_and_touches_nothing(bench: Bench) -> None:
    with bench.run("impossible") as run:
        run.start(*words((1, 1, 3)), devices=3)
        run.finish(2)
        [line] = [line for line in run.said().splitlines() if line.startswith("error:")]
        assert "mesh.tp=3" in line
        assert "compile ..." not in run.said()
        assert not run.folder.exists()


def test_every_fault_has_a_rig_and_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    sample, whole = matrix.chosen("ci", [], None), matrix.chosen("night", [], None)
    assert {fault.name for fault, _ in sample} < {fault.name for fault, _ in whole}
    assert all(count <= of for (fault, count) in sample for (other, of) in whole if fault is other)
    assert [count for fault, count in whole if fault.name == "sigkill"] == [200]
    assert matrix.chosen("ci", ["mesh"], 7)[0][1] == 7
    with pytest.raises(SystemExit, match="'sigkil'"):
        matrix.chosen("ci", ["sigkil"], None)


def test_a_rigs_lines_are_judged_and_kept(tmp_path: Path) -> None:
    [fault] = [fault for fault in matrix.FAULTS if fault.name == "damage"]
    *lines, about = matrix.trials_of(fault, 5)
    assert [(line["trial"], line["ok"]) for line in lines] == [(number, True) for number in range(5)]
    assert (about["about"]["trials"], about["about"]["code"]) == (5, 0)
    assert not fault.passed({**lines[0], "silent": True})
    out = tmp_path / "results.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in (*lines, about, {"fault": "mesh", "trial": 0})))
    assert [json.loads(line)["fault"] for line in matrix.kept(out, "damage")] == ["mesh"]


def test_the_table_has_medians_and_worst_cases() -> None:
    found = {fault.name: [] for fault in matrix.FAULTS}
    kill = {"fault": "sigkill", "ok": True, "lost_steps": 3, "inside_a_save": True}
    found["sigkill"] = [
        {**kill, "trial": 0, "recovery_seconds": 5.0},
        {**kill, "trial": 1, "recovery_seconds": 9.0},
        {**kill, "trial": 2, "recovery_seconds": 6.0, "ok": False},
        {"fault": "sigkill", "about": {"load_before_after": [1.2, 2.4]}},
    ]
    figures = "recovery 6 s, worst 9; 3 steps repeated; 3 inside a save"
    [row] = [line for line in table.table(found).splitlines() if line.startswith("| **SIGKILL at any")]
    assert row.split(" | ")[1:] == ["2 of 3", figures, "2 |"]
    assert "sigkill, trial 2" in table.failures(found)
    assert "mesh" in table.missing(found)
    assert table.picture(found).count("<circle") == 3


def test_the_page_is_made_from_the_results() -> None:
    before = table.PAGE.read_text(), table.PICTURE.read_text()
    table.main([])
    assert (table.PAGE.read_text(), table.PICTURE.read_text()) == before
