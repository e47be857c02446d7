"""A job says whether its weights are random, and conversations for random weights must be asked for."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from error_assertions import raises_error

from forerun.checkpoint.store import CheckpointStore
from forerun.cli.main import main
from forerun.config.load import load
from forerun.errors import UserError
from forerun.exit_codes import USER_MISTAKE
from forerun.methods.job_notes import warnings_of
from forerun.resolve.job_corpus import open_corpus, require_chosen_tokenizer, with_steps
from forerun.resolve.resolve_model import resolve_model
from forerun.run import train as loop
from forerun.run_folder.open_folder import open_folder
from forerun.track.display.make_display import make_display

ROOT = Path(__file__).resolve().parents[3]
TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
ROWS = {
    "messages": {"messages": TURNS},
    "pairs": {"prompt": "Hello", "chosen": "Good day", "rejected": "No"},
    "text": {"text": "some words of a text"},
    "answers": {"prompt": "1 + 1 =", "completion": " 2"},
}
JOB = "model: {layers: 1, embed: 32, heads: 2}\nsequence: 32\nbatch: 8\nsteps: 2\ndevice: cpu\nsample: {tokens: 0}\n"

WriteJob = Callable[..., Path]


def write_checkpoint(folder: Path, positions: int) -> None:
    """A config.json alone: nothing here reads weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": positions,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def not_compiled(*_: object) -> None:
    raise AssertionError("it was compiled")


@pytest.fixture
def write_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteJob:
    monkeypatch.chdir(tmp_path)

    def write(rows: str = "text", count: int = 40) -> Path:
        Path("rows.jsonl").write_text(f"{json.dumps(ROWS[rows])}\n" * count, encoding="utf-8")
        more = "preferences: dpo\n" if rows == "pairs" else ""
        data = "data: {path: rows.jsonl, store: store, workers: 1, chat_template: chatml}\n"
        Path("job.yaml").write_text(JOB + data + more, encoding="utf-8")
        return Path("job.yaml")

    return write


@pytest.mark.parametrize("command", [["check"], ["data"], ["data", "--shard", "0/1"], ["train"]])
def test_conversations_for_random_weights_are_rejected(
    write_job: WriteJob, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_job("messages")
    name, *rest = command
    assert main([name, str(file), "model=smollm2-135m", *rest]) == USER_MISTAKE
    told = capsys.readouterr().err
    assert "model=HuggingFaceTB/SmolLM2-135M" in told
    assert "data.tokenizer=owner/name" in told


def test_the_tokenizer_of_the_job_decides(write_job: WriteJob) -> None:
    for rows in ("messages", "pairs"):
        file = write_job(rows)
        with raises_error("E-RUN-037"):
            open_corpus(resolve_model(load(file).job))
        require_chosen_tokenizer(resolve_model(load(file, ["data.tokenizer=bytes"]).job))
    for rows in ("text", "answers"):
        require_chosen_tokenizer(resolve_model(load(write_job(rows)).job))


def test_every_command_says_that_the_weights_are_random(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_job()
    for command in ("check", "data"):
        assert main([command, str(file)]) == 0
        assert "weights (seed 0):" in capsys.readouterr().out
    assert resolve_model(load(file, ["model=qwen3-0.6b"]).job).starting_weights.endswith("model=Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("lr", ["3", "0.11"])
def test_a_learning_rate_that_is_far_too_high_is_warned_about(
    write_job: WriteJob, lr: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_job()
    assert main(["check", str(file), f"optimizer.lr={lr}"]) == 0
    assert f"warning: optimizer.lr={lr}" in capsys.readouterr().err
    assert [*warnings_of(resolve_model(load(file, ["optimizer.lr=0.1"]).job))] == []


@pytest.mark.parametrize("command", ["check", "data", "plan", "train"])
def test_every_command_warns_before_it_does_anything_slow(
    write_job: WriteJob, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise UserError("E-RUN-999", "stopped here", why="the test ends", fix="none")

    file = write_job()
    write_checkpoint(Path("model"), positions=16)
    for name in (
        "resolve.job_corpus.with_steps",
        "resolve.job_corpus.open_corpus",
        "run.train.open_corpus_with_progress",
    ):
        monkeypatch.setattr(f"forerun.{name}", stopped)
    assert main([command, str(file), "model=./model", "optimizer.lr=3"]) == USER_MISTAKE
    told = "".join(capsys.readouterr())
    assert "stopped here" in told
    assert "optimizer.lr=3" in told
    assert "max_position_embeddings" in told


def test_data_that_fills_no_batch_is_told_before_anything_is_compiled(
    write_job: WriteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load(write_job(), ["sequence=100000"]).job

    monkeypatch.setattr(loop, "compile_step", not_compiled)
    with (
        raises_error("E-DATA-013", "8"),
        make_display(io.StringIO()) as display,
    ):
        loop.train(job, display)
    with raises_error("E-DATA-013"):
        with_steps(resolve_model(load("job.yaml", ["sequence=100000", "steps=null"]).job))  # what `plan` does first
    assert main(["check", "job.yaml", "sequence=100000"]) == USER_MISTAKE


def test_a_job_with_feeders_is_accepted_with_a_warning(write_job: WriteJob, capsys: pytest.CaptureFixture[str]) -> None:
    """Earlier versions built batches in that many processes; the `job.yaml` of every old run has the key."""
    file = write_job()
    assert [*warnings_of(resolve_model(load(file, ["data.feeders=0"]).job))] == []
    assert main(["check", str(file), "data.feeders=2"]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: data.feeders=")]
    assert "data.feeders=2 has no" in line


def test_a_longer_sequence_than_a_checkpoint_knows_is_warned_about(tmp_path: Path, write_job: WriteJob) -> None:
    file = write_job()
    write_checkpoint(Path("model"), positions=2048)
    assert [*warnings_of(resolve_model(load(file, ["model=./model", "sequence=2048"]).job))] == []
    [text] = warnings_of(resolve_model(load(file, ["model=./model", "sequence=8192"]).job))
    assert re.findall(r"\d+", text.replace(str(tmp_path), ""))[:2] == ["8192", "2048"]
    # Random weights know no position yet, whatever the published model of that size was trained for.
    assert [*warnings_of(resolve_model(load(file, ["model=smollm2-135m", "sequence=16384"]).job))] == []


@pytest.mark.parametrize(("name", "hub"), [("qwen3-0.6b", "Qwen/Qwen3-0.6B"), ("Qwen/Qwen3-0.6B", None)])
def test_init_keeps_sizes_and_checkpoints_apart(
    name: str, hub: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--recipe", "sft", str(tmp_path / "job.yaml"), "--model", name]) == 0
    err = capsys.readouterr().err
    assert (hub is None and err == "") or f"--model {hub}" in err


def test_the_quickstart_and_the_docs_promise_the_same_losses() -> None:
    job = (ROOT / "examples/quickstart/job.yaml").read_text("utf-8")
    promised = [float(number) for number in re.findall(r"about (\d\.\d)", job)]
    page = (ROOT / "docs/tutorials/quickstart.md").read_text("utf-8")
    [(first, final)] = re.findall(r"^done: 200 steps, loss (\S+) -> (\S+) nats", page, re.MULTILINE)
    assert promised == [round(float(first), 1), round(float(final), 1)]
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"from {promised[0]} to about {promised[1]} nats" in readme


def test_the_first_example_of_the_docs_starts_from_pretrained_weights() -> None:
    [first, *_] = re.findall(
        r'```yaml title="job.yaml"\n(.*?)```', (ROOT / "docs/reference/job.md").read_text("utf-8"), re.DOTALL
    )
    assert re.search(r"^model: \w+/\S+$", first, re.MULTILINE)


def test_every_key_that_runs_code_is_in_the_security_page() -> None:
    """Each place that imports a class of the user's own belongs to a key, and the page names it."""
    callers = {
        path.relative_to(ROOT / "src/forerun").parts[0]
        for path in (ROOT / "src/forerun").rglob("*.py")
        if re.search(r"(?<!def )\b(create_plugin|import_plugin)\(", path.read_text("utf-8"))
        and path.name != "plugin.py"
    }
    keys = {"models": "model", "objectives": "objective", "program": "optimizer.name", "track": "track.to"}
    assert callers == set(keys)
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    [listed] = re.findall(r"with four exceptions(.*?)\n\n", page, re.DOTALL)
    assert [key for key in keys.values() if f"- `{key}`" not in listed] == []


def folder_of_adapters() -> None:
    Path("adapters").mkdir()
    config = {"peft_type": "LORA", "r": 2}
    Path("adapters/adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["lora.rank=4", "lora.start=./nowhere"], "E-RUN-003"),
        (["lora.rank=4", "lora.start=./adapters"], "E-RUN-003"),
        (["distil.teacher=qwen3-0.6b"], "E-RUN-028"),
    ],
)
def test_files_that_a_run_needs_are_looked_for_before_anything_is_compiled(
    write_job: WriteJob, monkeypatch: pytest.MonkeyPatch, overrides: list[str], what: str
) -> None:
    folder_of_adapters()
    job = load(write_job(), overrides).job
    monkeypatch.setattr(loop, "compile_step", not_compiled)
    with pytest.raises(UserError, match=what), make_display(io.StringIO()) as display:
        loop.train(job, display)


def test_other_data_than_the_checkpoints_is_told_before_anything_is_compiled(
    write_job: WriteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load(write_job()).job
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    folder = open_folder(resolved.job, fresh=False)
    with closing(CheckpointStore(folder.checkpoints(job), keep=1)) as store:
        store.save(1, {"x": np.zeros(1)}, {"data": "another digest", "job": resolved.job.model_dump(mode="json")})
    monkeypatch.setattr(loop, "compile_step", not_compiled)
    with raises_error("E-RUN-035", "1"), make_display(io.StringIO()) as display:
        loop.train(job, display)
