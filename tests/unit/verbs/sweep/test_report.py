from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from forerun.verbs.sweep.report import axis_chart, loss_chart, markdown, numeric_axes, page, print_table, write_report
from forerun.verbs.sweep.run_sweep import PreparedSweep, prepare
from forerun.verbs.sweep.sweep_file import LOSS, VALIDATION, RunResult, SweepResults

RATES = (1e-5, 3e-5, 1e-4)


def result(rate: float, seed: int, state: str = "finished", metric: float = 2.0) -> RunResult:
    name = f"tiny-lr-{rate:g}-seed-{seed}"
    return RunResult(
        name=name,
        values={"optimizer.lr": rate, "seed": seed},
        label=f"optimizer.lr={rate:g} seed={seed}",
        state=state,
        folder=Path("/runs/tiny-sweep") / name,
        steps=100,
        loss=metric if state == "finished" else None,
        validation_loss=None,
        tokens=12_345_678,
        seconds=3723.0,
        program="abc",
        compile_cached=seed > 0,
        error="error: <b>diverged</b>" if state == "failed" else "",
        curve=[(step, 4.0 - step / 50 * (1 + rate * 1e4)) for step in range(1, 101)],
    )


@pytest.fixture
def results() -> SweepResults:
    """Six runs, the best first. The last one failed."""
    metrics = {(3e-5, 0): 2.1, (3e-5, 1): 2.2, (1e-5, 1): 2.4, (1e-5, 0): 2.6, (1e-4, 0): 2.9}
    runs = [result(rate, seed, metric=metric) for (rate, seed), metric in metrics.items()]
    return SweepResults(LOSS, (*runs, result(1e-4, 1, "failed")))


@pytest.fixture
def sweep(tmp_path: Path) -> PreparedSweep:
    (tmp_path / "tiny.yaml").write_text("model: {layers: 1, embed: 16, heads: 2}\ndata: text\nsteps: 4\n")
    return prepare(tmp_path / "tiny.yaml", ["optimizer.lr=1e-5,3e-5,1e-4", "seed=0,1", f"runs={tmp_path / 'runs'}"])


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(results: SweepResults, columns: int) -> None:
    stream = io.StringIO()
    print_table(Console(file=stream, width=columns), results)
    head, *rows = stream.getvalue().splitlines()
    assert head.split() == ["lr", "seed", "loss", "tokens", "time", "state", *(["run"] if columns == 120 else [])]
    assert len(rows) == 6
    assert max(map(len, (head, *rows))) <= columns
    assert rows[0].split()[:4] == ["best", "3e-05", "0", "2.1000"]
    assert rows[0].split()[4:9] == ["12.3M", "1", "h", "02", "min"]
    assert rows[-1].split()[-2 if columns == 120 else -1] == "failed"


def test_the_table_in_markdown_has_all_runs(sweep: PreparedSweep, results: SweepResults) -> None:
    lines = markdown(sweep, results).splitlines()
    rows = [line for line in lines if line.startswith("| ") and "---" not in line]
    assert rows[0].split(" | ")[1:4] == ["optimizer.lr", "seed", "loss"]
    assert len(rows) == 1 + 6
    assert sum("best" in row for row in rows) == 1
    assert any("5 finished, 1 failed" in line for line in lines)


def test_the_page_shows_curves_and_axes_without_any_script(sweep: PreparedSweep, results: SweepResults) -> None:
    text = page(sweep, results)
    assert "<script" not in text
    assert "http" not in re.sub(r'http-equiv|xmlns="[^"]*"', "", text)
    assert "&lt;b&gt;diverged" in text, "texts of logs are escaped"
    assert text.count('class="curve') == 2 * 6, "wide and narrow"
    assert text.count("<h2>") == 4, "runs, loss by step, loss by the rate, the job"


def test_the_curves_are_where_the_numbers_are(results: SweepResults) -> None:
    charts = loss_chart(results)
    assert charts is not None
    lines = [node for node in charts["wide"].node.iter("polyline") if "curve" in node.get("class", "")]
    assert [node.get("class") for node in lines][-1] == "curve c0 best", "the best run is drawn last"
    first, *_, last = str(lines[-1].get("points")).split()
    assert float(first.split(",")[0]) < float(last.split(",")[0])
    assert float(first.split(",")[1]) < float(last.split(",")[1]), "the loss falls"


def test_the_axis_chart_has_a_point_for_each_finished_run_and_the_means(results: SweepResults) -> None:
    assert numeric_axes(results.runs) == ["optimizer.lr"], "a seed has no order"
    charts = axis_chart(results, "optimizer.lr")
    assert charts is not None
    plot = charts["wide"]
    assert len(list(plot.node.iter("circle"))) == 5
    means = {1e-5: 2.5, 3e-5: 2.15, 1e-4: 2.9}
    [line] = plot.node.iter("polyline")
    assert line.get("points") == " ".join(f"{plot.x(rate):.1f},{plot.y(mean):.1f}" for rate, mean in means.items())
    ElementTree.fromstring(plot.__html__())


def test_a_sweep_without_results_has_a_page(sweep: PreparedSweep) -> None:
    results = sweep.results()
    assert (results.best, loss_chart(results), axis_chart(results, "seed")) == (None, None, None)
    markdown_path, page_path = write_report(sweep, results)
    assert "6 waiting" in markdown_path.read_text()
    assert "6 waiting" in page_path.read_text()


def test_many_runs_share_colours_by_their_first_value() -> None:
    runs = tuple(result(rate, seed, metric=2.0 + rate) for rate in RATES for seed in range(5))
    charts = loss_chart(SweepResults(VALIDATION, runs))
    assert charts is None, "no run has a validation loss"
    charts = loss_chart(SweepResults(LOSS, runs))
    assert charts is not None
    css = [str(node.get("class")).split()[1] for node in charts["wide"].node.iter("polyline")]
    assert sorted(css) == ["c0"] * 5 + ["c1"] * 5 + ["c2"] * 5
