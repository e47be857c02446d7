"""Every command has a counterpart in the API that gives the same result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from error_assertions import assert_error

import forerun as fr
from forerun.cli.commands import COMMANDS
from forerun.cli.main import main

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job, and the run that the command line made of it."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "texts").mkdir()
    (folder / "texts" / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    (folder / "tiny.yaml").write_text(
        f"model: {{layers: 1, embed: 16, heads: 2}}\ndata: {{path: texts, ledger: true}}\nsequence: 16\nbatch: 8\n"
        "steps: 4\ndevice: cpu\ndevices: 1\nprecision: {compute: float32}\nremat: none\nsample: {tokens: 4}\n"
        f"runs: {folder / 'runs'}\n"
    )
    assert main(["train", str(folder / "tiny.yaml"), "name=command"]) == 0
    return folder


def test_the_page_names_a_function_for_every_command() -> None:
    page = (ROOT / "docs" / "how-to" / "python.md").read_text("utf-8")
    table = page[page.index("| command | function |") :]
    assert set(re.findall(r"`forerun (\w+)`", table)) == set(COMMANDS)
    assert set(re.findall(r"`fr\.(\w+)`", table)) <= set(fr.__all__)


def test_train(folder: Path) -> None:
    run = fr.train(fr.load_job(folder / "tiny.yaml", "name=api"))
    command = fr.open_run(folder / "runs" / "command")
    assert (run.finished, command.finished) == (True, True)
    assert run.folder == folder / "runs" / "api"
    assert run.metrics["loss"] == command.metrics["loss"]
    assert run.summary["steps"] == 4
    assert len(run.sample) > 0


def test_one_step_by_hand_is_the_step_of_train(folder: Path) -> None:
    program = fr.build(fr.load_job(folder / "tiny.yaml"))
    state, losses = program.init(), []
    for batch in program.batches(steps=3):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
    run = fr.open_run(folder / "runs" / "command")
    assert losses == run.metrics["loss"][:3]
    assert program.hash == run.summary["program"]


def test_generate(folder: Path, capsys: Capture) -> None:
    run = str(folder / "runs" / "command")
    assert main(["generate", run, "It was", "--max-tokens", "6", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    model = fr.load_model(run)
    assert model.generate("It was", max_tokens=6, seed=3) + "\n" == printed
    assert "".join(model.stream("It was", max_tokens=6, seed=3)) + "\n" == printed
    with pytest.raises(fr.UserError) as caught:
        model.chat([{"role": "user", "content": "Hello"}])
    assert_error(caught.value, "E-COMMAND-021")


def test_eval(folder: Path, capsys: Capture) -> None:
    run, data = str(folder / "runs" / "command"), str(folder / "texts")
    assert main(["eval", run, "--data", data, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["data"]
    model = fr.load_model(run)
    before = model.evaluate(data)
    model.generate("It", max_tokens=1)  # takes the weights over: the next evaluation reads them again
    assert model.evaluate(data) == before
    assert (before.loss, before.tokens, before.context) == (printed["loss"], printed["tokens"], printed["context"])


def test_export(folder: Path) -> None:
    run = folder / "runs" / "command"
    assert main(["export", str(run), "--to", str(folder / "by-command")]) == 0
    exported = fr.open_run(run).export(folder / "by-api")
    weights = [(one / "model.safetensors").read_bytes() for one in (folder / "by-command", exported.folder)]
    assert weights[0] == weights[1]


def test_check(folder: Path, capsys: Capture) -> None:
    assert main(["check", str(folder / "tiny.yaml"), "--all"]) == 0
    printed = capsys.readouterr().out
    report = fr.check(folder / "tiny.yaml")
    for name, value in report.derived.items():
        assert re.search(rf"^  {re.escape(name)} +{re.escape(value)} ", printed, flags=re.M), name
    assert "parameters" in report._repr_html_()
    in_python = fr.check(fr.load_job(folder / "tiny.yaml"))
    assert in_python.derived == report.derived


def test_data(folder: Path, capsys: Capture) -> None:
    job, ledger = folder / "tiny.yaml", folder / "runs" / "command" / "ledger.jsonl"
    report = fr.inspect_data(job)
    assert main(["data", str(job)]) == 0
    assert repr(report) in capsys.readouterr().out
    assert all(part.tokens > 0 for part in fr.verify_data(job).values())
    assert fr.compare_ledger(job, ledger).steps == 4
    with pytest.raises(fr.UserError) as caught:
        fr.compare_ledger(fr.load_job(job, "seed=5"), ledger)
    assert_error(caught.value, "E-COMMAND-007")
    ((_, complete),) = fr.tokenize_data(job, shard=(0, 1)).values()
    assert complete


def test_init_schema_hardware_explain(tmp_path: Path, capsys: Capture) -> None:
    assert main(["init", str(tmp_path / "a" / "job.yaml"), "--recipe", "sft"]) == 0
    capsys.readouterr()
    assert len(fr.create_job(tmp_path / "b" / "job.yaml", "sft")) == 1
    texts = [(tmp_path / name / "job.yaml").read_text() for name in "ab"]
    assert texts[0].replace("/a/", "/b/").replace("runs/a", "runs/b") == texts[1]
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == fr.job_schema()
    assert main(["hardware", "chips"]) == 0
    assert capsys.readouterr().out == fr.hardware_table("chips") + "\n"
    assert main(["explain", "E-JOB-018"]) == 0
    assert capsys.readouterr().out == f"{fr.explain('e-job-18')}\n"


def test_doctor() -> None:
    findings = fr.diagnose()
    assert {"python", "jax"} <= {finding.name for finding in findings}


def test_a_job_of_python_has_absolute_paths_and_renders(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    job = fr.Job(
        name="relative", model={"layers": 1, "embed": 16, "heads": 2}, data="texts", sequence=16, batch=8, steps=1,
        device="cpu", devices=1, sample={"tokens": 0}, runs=str(tmp_path),
    )  # fmt: skip
    run = fr.train(job)
    assert run.job.data.path == str(folder / "texts")
    assert fr.open_run(tmp_path / "relative").job.data.path == str(folder / "texts")
    assert "sequence" in job._repr_html_()
    assert "<svg" not in run._repr_html_()  # one point is not a curve
    assert "&lt;svg" in fr.open_run(folder / "runs" / "command")._repr_html_()


def test_mistakes_have_codes(folder: Path) -> None:
    with pytest.raises(fr.UserError) as caught:
        fr.load_job(folder / "tiny.yaml", "optimizer.lr=fast")
    assert caught.value.code.startswith("E-JOB-")
    with pytest.raises(fr.UserError) as caught:
        fr.open_run(folder / "texts")
    assert_error(caught.value, "E-RUN-020")
