"""Files of a run with values of wrong types: rejected or omitted, and no view ends with a bug."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from error_assertions import assert_error
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from run_records import TPU, metrics_rows, write_run

from forerun.errors import UserError
from forerun.report.comparison import compare_records, comparison_page
from forerun.report.page import page
from forerun.report.run_facts import run_facts
from forerun.report.run_files import DamagedRunFile
from forerun.report.run_record import RunRecord, read_run
from forerun.report.terminal import print_comparison, print_report
from forerun.watch.dashboard import dashboard, plain_line
from forerun.watch.run_list import list_runs
from forerun.watch.run_reader import FolderReader
from forerun.watch.web_server import version_of

SUMMARY: dict[str, Any] = {
    "steps": 20, "resumed_at": 0, "parameters": 10, "trainable_parameters": 5, "step_seconds": 1.0, "device": TPU,
    "predicted_step_seconds": 1.0, "tokens_per_second": 5.0, "mfu": 0.4, "hbm_peak_bytes": 7, "versions": {"jax": "1"},
    "goodput": {"share": 0.5, "wall_seconds": 4.0, "seconds": {"useful": 2.0, "other": 2.0}}, "loss_unit": "nats",
    "mesh": "data=1", "program": "a", "compile_cached": True, "train_seconds": 3.0, "data_requests": 3,
    "validation": {},
}  # fmt: skip
HOST: dict[str, Any] = {
    "name": "a",
    "step": 3,
    "lag": 1,
    "memory_bytes": 5,
    "memory_limit_bytes": 9,
    "age_seconds": 1.0,
}
LINES: dict[str, dict[str, Any]] = {
    "metrics.jsonl": metrics_rows()[0] | {
        "step": 21, "samples": [{"prompt": "p", "text": "t"}], "hbm_bytes": 5, "mfu": 0.5,
    },
    "events.jsonl": {
        "event": "time", "unix_seconds": 1_700_000_030.0, "step": 3, "seconds": {"useful": 2.0}, "session": 1,
        "name": "data",
    },
    "skips.jsonl": {"step": 4, "why": "nan", "loss": None},
    "exports.jsonl": {"folder": "f", "format": "g", "step": 3, "bytes": 5, "unix_seconds": 1_700_000_000.0},
}  # fmt: skip

numbers = st.sampled_from([0, -1, 1, True, 10**18, 2**63, 10**400, -(10**400), 1e308, -1e308, 1e-320, 0.5])
special = st.sampled_from([float("nan"), float("inf"), float("-inf")])
texts = st.sampled_from(["", "x", "\x1b[2J", "<b>", "\ud800", "9" * 5000])
json_values = st.recursive(
    st.none() | numbers | special | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)


def changed(content: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return `content` with up to three other values, also inside its objects."""
    paths = [(key,) for key in content]
    paths += [(key, inner) for key, value in content.items() if isinstance(value, dict) for inner in value]

    def change(changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
        copy = json.loads(json.dumps(content))
        for path, value in changes:
            target = copy
            for key in path[:-1]:
                target = target[key] if isinstance(target[key], dict) else {}
            target[path[-1]] = value
        return copy

    return st.lists(st.tuples(st.sampled_from(paths), json_values), max_size=3).map(change)


def show(record: RunRecord) -> None:
    """Make everything that shows a run."""
    facts = run_facts(record)
    assert page(record, facts)
    comparison = compare_records([record, record])
    assert comparison_page(comparison)
    console = Console(file=io.StringIO(), width=80)
    print_report(console, record, facts)
    print_comparison(console, comparison)
    assert dashboard(record, facts.status, 100, 40)
    assert plain_line(record, facts.status)
    assert version_of(record, facts.status)


@settings(max_examples=50)
@given(changed(SUMMARY), changed(HOST), st.fixed_dictionaries({name: changed(row) for name, row in LINES.items()}))
@example(SUMMARY, HOST, LINES)
@example(SUMMARY | {"goodput": {"seconds": {"useful": "x"}}}, HOST, LINES)
@example(SUMMARY | {"device": [1]}, HOST, LINES)
@example(SUMMARY, HOST, LINES | {"metrics.jsonl": {"step": 3, "loss": 1.0, "samples": ["x"]}})
def test_no_content_of_a_file_is_a_bug(
    summary: dict[str, Any], host: dict[str, Any], lines: dict[str, dict[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        run = write_run(Path(place) / "run", metrics_rows())
        (run / "summary.json").write_text(json.dumps(summary))
        (run / "hosts.json").write_text(json.dumps({"hosts": [host], "unix_seconds": 5.0}))
        for name, row in lines.items():
            with (run / name).open("a") as file:
                file.write(json.dumps(row) + "\n")
        (entry,) = list_runs(place)
        try:
            record = read_run(run)
        except DamagedRunFile:
            assert entry.state == "broken"
            with pytest.raises(DamagedRunFile):
                FolderReader(run).read()
            return
        assert entry.state != "broken", entry.detail
        assert repr(FolderReader(run).read().metrics) == repr(tuple(record.metrics))  # NaN is not equal to itself
        show(record)


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        ("summary.json", {"steps": "20"}, "steps"),
        ("summary.json", {"steps": -1}, "steps"),
        ("summary.json", {"device": {"count": 1.5}}, "device.count"),
        ("summary.json", {"device": "tpu"}, "device"),
        ("summary.json", {"goodput": {"seconds": {"useful": "2"}}}, "goodput.seconds.useful"),
        ("summary.json", {"tokens_per_second": [1]}, "tokens_per_second"),
        ("summary.json", {"versions": ["jax"]}, "versions"),
        ("hosts.json", {"hosts": [{"step": 1}, {"step": "2"}]}, "hosts.1.step"),
        ("hosts.json", {"hosts": {"a": 1}}, "hosts"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(tmp_path: Path, file: str, content: dict[str, Any], key: str) -> None:
    run = write_run(tmp_path / "run", metrics_rows())
    (run / file).write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        read_run(run)
    assert_error(caught.value, "E-REPORT-003", what=str(run / file), why=f"{key}: ")


@pytest.mark.parametrize(
    "row",
    [
        {"step": 21, "loss": float("nan")},
        {"step": 21, "loss": 1.0, "unix_seconds": "now"},
        {"step": 21, "loss": 1.0, "unix_seconds": 1e300},
        {"step": -21, "loss": 1.0},
        {"step": True, "loss": 1.0},
        {"step": 21, "samples": ["text"]},
        {"step": 21, "loss": 10**400},
    ],
)
def test_a_line_of_a_wrong_type_is_omitted(tmp_path: Path, row: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run", [*metrics_rows(), row, {"step": 22, "loss": 0.5}])
    record = read_run(run)
    assert [line["step"] for line in record.metrics] == [*range(1, 21), 22]
    assert [line["step"] for line in FolderReader(run).read().metrics] == [*range(1, 21), 22]


def test_unknown_keys_and_missing_values_are_accepted(tmp_path: Path) -> None:
    """Later versions and trackers add keys. A value that is not known is null."""
    summary = dict.fromkeys(SUMMARY) | {"steps": 20, "made_up": {"deep": [1]}}
    run = write_run(tmp_path / "run", [*metrics_rows(), {"step": 21, "made_up": "x"}], summary=summary)
    record = read_run(run)
    assert record.summary == summary
    assert record.metrics[-1] == {"step": 21, "made_up": "x"}
    show(record)
