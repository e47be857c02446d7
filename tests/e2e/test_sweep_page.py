"""docs/how-to/sweep.md: a sweep at a tiny size, its table and its report, and the same command again."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import forerun as fr
from forerun.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
JOB = """\
model: {layers: 1, embed: 16, heads: 2}
data: text
sequence: 16
batch: 8
steps: 3
device: cpu
devices: 1
precision: {compute: float32}
sample: {tokens: 0}
"""


def command() -> list[str]:
    """The first command of the page, with values that suit a model from scratch."""
    text = (ROOT / "docs/how-to/sweep.md").read_text("utf-8")
    found = re.search(r"```sh\nforerun (sweep .*)\n", text)
    assert found
    return found[1].replace("1e-5,3e-5,1e-4", "1e-3,1e-2").replace("seed=0,1", "seed=0").split()


@pytest.mark.slow
def test_the_command_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    (tmp_path / "job.yaml").write_text(JOB)
    words = [*command(), "name=tiny", "runs=runs"]

    assert main([*words, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "2 runs (2 optimizer.lr)" in told
    assert "1 compilation expected" in told
    assert not (tmp_path / "runs").exists(), "a dry run writes nothing"

    assert main(words) == 0
    told = capsys.readouterr().out
    folder = tmp_path / "runs/tiny-sweep"
    summaries = {
        name: json.loads((folder / name / "summary.json").read_text()) for name in ("tiny-lr-0.001", "tiny-lr-0.01")
    }
    first, second = summaries.values()
    assert (first["compile_cached"], second["compile_cached"]) == (False, True), "they share one program"
    assert first["program"] == second["program"]
    best = min(summaries, key=lambda name: summaries[name]["final_loss"])
    row = next(line for line in told.splitlines() if line.startswith("best"))
    assert row.split()[-1] == best
    assert f"{summaries[best]['final_loss']:.4f}" in row
    assert f"{summaries[best]['final_loss']:.4f}" in (folder / "sweep.md").read_text()
    assert 'class="curve' in (folder / "sweep.html").read_text()

    # More values, two at a time. The finished runs are kept.
    if len(os.sched_getaffinity(0)) >= 2:
        more = [word.replace("1e-3,1e-2", "1e-3,1e-2,2e-2,3e-2") for word in words]
        assert main([*more, "--parallel", "2"]) == 0
        told = capsys.readouterr().out
        assert "optimizer.lr=0.001,0.01 -> 0.001,0.01,0.02,0.03" in told
        assert "2 are finished, 2 are to be trained" in told
        assert len([line for line in told.splitlines() if line.startswith("run ")]) == 2
        assert len(re.findall(r" finished +tiny-lr-", told)) == 4
        job = fr.open_run(folder / "tiny-lr-0.02").job
        assert job.optimizer.lr == 0.02

    # The same command trains nothing again; the Python function returns the same results.
    result = fr.sweep(tmp_path / "job.yaml", *words[2:])
    assert "2 are finished, 0 are to be trained" in capsys.readouterr().out
    assert result.best is not None
    assert result.best.folder.name == best
    assert result.table["loss"] == sorted(summary["final_loss"] for summary in summaries.values())
    assert result.failed == {}
    assert "<iframe sandbox" in result._repr_html_()
    assert str(result).split()[:3] == ["optimizer.lr", "loss", "tokens"]
