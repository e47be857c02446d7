"""The page of a run: it has the values of the files, loads nothing, and escapes the texts of users."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from run_records import CPU, JOB, START, TPU, PageContent, metrics_rows, write_run

from forerun.config.load import load
from forerun.hardware.prices import cheapest
from forerun.report.page import page, share_texts
from forerun.report.run_record import RunRecord, read_run

SCRIPT = "<script>alert(1)</script>"
SUMMARY = {
    "steps": 20,
    "step_seconds": 0.5,
    "predicted_step_seconds": 0.4,
    "tokens_per_second": 1000.0,
    "parameters": 1_000_000,
    "device": TPU,
    "versions": {"forerun": "0.1.0", "jax": "0.10.2"},
    "goodput": {"share": 0.5, "wall_seconds": 3600.0, "seconds": {"useful": 1800.0, "compile": 900.0, "saves": 900.0}},
}
SAMPLE = {"step": 20, "samples": [{"prompt": "It", "text": f" was {SCRIPT}"}], "unix_seconds": START + 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    events = [
        {"unix_seconds": START, "event": "start", "session": 1},
        {"unix_seconds": START, "event": "resume", "session": 1, "step": 0},
        {"unix_seconds": START + 10, "event": "start", "session": 2},
        {"unix_seconds": START + 12, "event": "resume", "session": 2, "step": 8},
        {"unix_seconds": START + 20, "event": "end", "session": 2, "step": 20},
    ]
    return write_run(
        tmp_path / "tpu",
        [*metrics_rows(), SAMPLE],
        job=JOB + "optimizer: {lr: 7e-4}\n",
        summary=SUMMARY,
        events=events,
        skips=[{"step": 13, "why": "loss nan"}],
        exports=[{"unix_seconds": START, "step": 20, "folder": "out", "format": "Hugging Face", "bytes": 2048}],
    )


def content(record: RunRecord | Path) -> PageContent:
    return PageContent(page(record if isinstance(record, RunRecord) else read_run(record)))


def test_curves_are_those_of_the_file(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = content(folder)
    for name, key in (("loss", "loss"), ("validation", "validation_loss")):
        expected = [(row["step"], row[key]) for row in rows if key in row]
        assert found.curves("Loss")[name] == [pytest.approx(point, abs=1e-3) for point in expected]
    assert len(found.curves("Learning rate")["Learning rate"]) == 20


def test_the_header_has_the_results(folder: Path) -> None:
    texts = content(folder).texts
    for expected in ("finished", "3.0000", "3.5000", "at step 20", "1,000"):
        assert expected in texts


def test_restarts_and_skipped_steps_are_on_the_axis_of_steps_and_on_that_of_time(folder: Path) -> None:
    figures: list[list[tuple[str, float]]] = []
    for tag, attributes in content(folder).tags:
        if tag == "figure":
            figures.append([])
        css = str(attributes.get("class"))
        if tag == "i" and css.startswith("mark "):
            share = re.fullmatch(r"left:([\d.]+)%", str(attributes["style"]))
            assert share
            figures[-1].append((css.removeprefix("mark "), float(share[1])))
    by_step = [("restart", 100 * 7 / 19), ("skip", 100 * 12 / 19)]
    assert figures[0] == [(css, pytest.approx(share, abs=0.01)) for css, share in by_step]
    by_time = [("restart", 100 * 12 / 20), ("skip", 100 * 13 / 20)]  # of the 20 seconds since the start
    assert figures[-1] == [(css, pytest.approx(share, abs=0.01)) for css, share in by_time]


def test_the_time_adds_up_to_all(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", metrics_rows(), summary=SUMMARY)
    tags = content(run).tags
    widths = [float(str(a["width"]).rstrip("%")) for tag, a in tags if tag == "rect"]
    assert widths == [50.0, 25.0, 25.0]


@pytest.mark.parametrize("values", [[1, 1, 1], [39.66, 23.16, 16.06, 21.12], [1e-9, 5.0], [7.0]])
def test_printed_shares_add_up_to_100_percent(values: list[float]) -> None:
    shares = [float(text.removesuffix(" %")) for text in share_texts(values)]
    assert sum(round(10 * share) for share in shares) == 1000
    assert shares == [pytest.approx(100 * value / sum(values), abs=0.1) for value in values]


def test_predicted_and_measured_time_and_cost(folder: Path) -> None:
    rows = {row[0]: row[1:] for row in content(folder).rows if row}
    assert rows["step time"] == ["400 ms", "500 ms", "+25.0 %"]
    price = cheapest("v6e")
    assert price is not None
    usd = 8 * price.usd_per_chip_hour_on_demand * 20 * 0.5 / 3600  # 8 chips, 20 steps of half a second
    assert rows["cost of 20 steps"][1] == f"${usd:.2f}"


def test_a_cpu_has_no_price(tmp_path: Path) -> None:
    run = write_run(tmp_path / "cpu", metrics_rows(), summary={"steps": 20, "step_seconds": 0.5, "device": CPU})
    assert "not known for CPU" in content(run).texts


def test_differences_environment_and_exports(folder: Path) -> None:
    rows = content(folder).rows
    assert ["optimizer.lr", "0.0007", "0.0003"] in rows
    assert ["jax", "0.10.2"] in rows
    assert any(row[:4] == ["out", "Hugging Face", "20", "2.00 KiB"] for row in rows)
    assert not any(row[0] == "seed" for row in rows if row)


def test_texts_of_users_stay_text(folder: Path) -> None:
    record = read_run(folder)
    job = record.job.model_copy(update={"name": f"{SCRIPT}\x1b[2J\u202e"})
    text = page(RunRecord(f"gs://{SCRIPT}", job, record.metrics, skips={3: SCRIPT}, exports=[{"folder": SCRIPT}]))
    assert text.count("alert(1)") >= 5
    assert SCRIPT not in text
    assert [tag for tag, _ in PageContent(text).tags].count("script") == 1
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_page_loads_nothing_and_runs_only_its_own_script(folder: Path) -> None:
    text = page(read_run(folder))
    assert not re.search(r"https?:|//[a-z]|url\(|@import", re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL))
    tags = PageContent(text).tags
    assert not {tag for tag, _ in tags} & {"link", "img", "iframe", "object", "base", "form"}
    assert not [a for _, a in tags if {"src", "href", "action", "onclick"} & a.keys()]
    (policy,) = [str(a["content"]) for tag, a in tags if tag == "meta" and "http-equiv" in a]
    (script,) = re.findall(r"<script>(.*)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not re.search(r"fetch|XMLHttp|WebSocket|eval|innerHTML", script)


def test_a_million_steps_are_a_small_page(folder: Path) -> None:
    rows = [
        {"step": step, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "step_seconds": 0.5, "unix_seconds": START + step}
        for step in range(50, 1_000_001, 50)
    ]
    rows[7_000]["loss"] = 5.5  # one row of 20,000
    skips = dict.fromkeys(range(5000), "loss nan")
    samples = [{"step": step, "samples": [{"prompt": "a" * 9000, "text": "b" * 9000}]} for step in range(300)]
    text = page(RunRecord("run", load(folder / "job.yaml").job, [*rows, *samples], skips=skips))
    assert len(text) < 1_000_000
    highest = max(value for _, value in PageContent(text).curves("Loss")["loss"])
    assert highest == pytest.approx(5.5, abs=1e-3)


@pytest.mark.parametrize("rows", [[], metrics_rows(1), [{"step": 1, "loss": None, "unix_seconds": START}]])
def test_a_run_with_few_records_has_a_page(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    assert "few" in content(write_run(tmp_path / "few", rows)).texts


def test_a_killed_run_with_a_torn_line_has_a_page(folder: Path) -> None:
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    found = content(folder)
    assert "interrupted" in found.texts
    assert len(found.curves("Loss")["loss"]) == 20
