"""The jobs in examples/guides, at tiny size: from their kind of data to an exported model that answers a prompt."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import load_file

from forerun.cli.main import main
from forerun.config.schema import Model
from forerun.models.families.registry import family_for
from forerun.models.model_facts import config_of, model_of
from forerun.models.plugin import use_job_folder
from forerun.nn import spec
from forerun.track.metrics import read_metrics
from forerun.weights_io import documents
from forerun.weights_io.write import write_params

GUIDES = Path(__file__).resolve().parents[2] / "examples" / "guides"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TINY = ["device=cpu", "devices=1", "batch=4", "micro_batch=4", "precision.compute=float32", "remat=none",
        "sample.tokens=0"]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_class_of_another_test() -> Iterator[None]:
    """Forget the example models: another test may have imported them from another folder, which `--code` rejects."""

    def forget() -> None:
        use_job_folder(None)
        for name in ("reservoir", "recurrent_depth", "multi_stream"):
            sys.modules.pop(name, None)

    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of one layer as `export` writes it: random weights, a byte tokenizer, a chat template."""
    made = tmp_path_factory.mktemp("guides")
    tiny = made / "tiny"
    tiny.mkdir()
    section = Model(layers=1, embed=32, heads=2, kv_heads=1, head_dim=32, mlp=64, vocab=264, qk_norm=True)
    config, model = config_of(section), model_of(section)
    family = family_for(config)
    params = jax.jit(lambda key: spec.initial(model.specs(), key))(jax.random.key(0))
    write_params(tiny, params, family.table, model, "F32")
    documents.write_json(tiny / "config.json", documents.config_json(family, config, None, "F32", 256))
    documents.write_tokenizer(None, tiny, 256)
    documents.write_chat_template(tiny, CHATML, {}, None)
    return made


def forerun(*words: str) -> None:
    assert main(list(words)) == 0, words


def test_chain_of_thought_fine_tuning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = shutil.copytree(GUIDES / "cot-sft", folder / "cot-sft") / "job.yaml"
    forerun("train", str(job), f"model={folder / 'tiny'}", f"runs={folder / 'runs'}", "epochs=null", "steps=2",
            "sequence=256", *TINY)  # fmt: skip
    forerun("export", str(folder / "runs/cot-sft"), "--to", str(folder / "sft-model"))
    capsys.readouterr()
    forerun("generate", str(folder / "sft-model"), "Is silence an acceptance?", "--max-tokens", "3", "--device", "cpu")
    assert capsys.readouterr().out.endswith("\n")


def test_four_bit_training_and_a_recovery_adapter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = shutil.copytree(GUIDES / "qat-recovery", folder / "qat-recovery") / "job.yaml"
    (folder / "qat-recovery/texts").mkdir()
    for n in range(8):
        text = f"Chapter {n}. It was the best of times, it was the worst of times. " * 12
        (folder / f"qat-recovery/texts/{n}.txt").write_text(text)
    words = [str(job), f"model={folder / 'tiny'}", f"distil.teacher={folder / 'tiny'}", f"runs={folder / 'runs'}",
             "sequence=32", "steps=2", "checkpoint.every=1", "validation.every=1",
             "data.validation=0.5", *TINY]  # fmt: skip
    forerun("cache", *words)
    assert capsys.readouterr().out.count("done: ") == 2
    forerun("train", *words)
    forerun("export", str(folder / "runs/qat-recovery"), "--to", str(folder / "int4"))
    first = load_file(folder / "runs/qat-recovery-qat/model/model.safetensors")
    last = load_file(folder / "int4/model.safetensors")
    integers = [name for name in first if name.endswith(("weight_packed", "weight_scale"))]
    assert len(integers) == 14
    assert [name for name in integers if first[name].tobytes() != last[name].tobytes()] == []
    record = json.loads((folder / "runs/qat-recovery-qat/model-result.json").read_text())
    assert record["newest"] == 2
    capsys.readouterr()
    forerun("generate", str(folder / "runs/qat-recovery"), "It was", "--max-tokens", "3", "--device", "cpu")
    assert capsys.readouterr().out.endswith("\n")


def trained_and_asked(folder: Path, name: str, capsys: pytest.CaptureFixture[str], prompt: str, *words: str) -> Path:
    """Train a copy of a guide with a custom class, export it, ask the export for text, and return its folder."""
    runs, target = folder / "runs", folder / f"{name}-model"
    code = folder / name
    forerun(
        "train",
        str(code / "job.yaml"),
        f"runs={runs}",
        "steps=2",
        "sequence=32",
        "batch=4",
        *words,
        *TINY[:2],
        *TINY[4:],
    )
    rows = read_metrics(runs / name / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    forerun("export", str(runs / name), "--to", str(target))
    capsys.readouterr()
    forerun("generate", str(target), prompt, "--max-tokens", "3", "--device", "cpu", "--code", str(code))
    assert capsys.readouterr().out.endswith("\n")
    return target


def test_a_reservoir_on_stories_with_its_own_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = shutil.copytree(GUIDES / "tinystories-reservoir", folder / "tinystories-reservoir")
    forerun("tokenizer", "train", str(place / "stories.txt"), "--vocab", "400", "--to", str(place / "tokenizer"))
    target = trained_and_asked(
        folder, "tinystories-reservoir", capsys, "Once upon", "epochs=null",
        "model.options={units: 32, embed: 16, mlp: 32}", "data.validation=0.1", "validation.every=2",
    )  # fmt: skip
    assert (target / "tokenizer.json").read_bytes() == (place / "tokenizer" / "tokenizer.json").read_bytes()


def test_a_reasoner_on_any_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(GUIDES / "multi-device", folder / "multi-device")
    options = "model.options={embed: 16, heads: 2, mlp: 32, layers: 1, high_cycles: 2, low_cycles: 1}"
    trained_and_asked(folder, "multi-device", capsys, "Question: 1 + 1", "epochs=null", options, "validation.every=2")


def test_streams_and_an_equilibrium_from_parquet_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = shutil.copytree(GUIDES / "pretrain-3b", folder / "pretrain-3b")
    texts = [f"Lesson {n}: water boils at 100 degrees, and ice melts at 0 degrees." for n in range(60)]
    parquet.write_table(pyarrow.table({"text": texts, "token_length": [12] * 60}), place / "part.parquet")
    trained_and_asked(
        folder, "pretrain-3b", capsys, "Lesson 1", f"data.path={place}/*.parquet", "data.tokenizer=bytes",
        "log_every=1", "data.limit=50",
        "model.options={embed: 16, heads: 2, mlp: 32, layers: 1, streams: 2, equilibrium: 3}",
    )  # fmt: skip
    residuals = [
        row["equilibrium_residual"] for row in read_metrics(folder / "runs/pretrain-3b/metrics.jsonl") if "loss" in row
    ]
    assert len(residuals) == 2
    assert all(0 <= residual < 1 for residual in residuals)
