"""Export as a user meets it: what is refused, what fails loudly, and that nothing half-done is left."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import raises_error
from recording_reporter import RecordingReporter
from safetensors.numpy import load_file, save_file

from forerun.config.load import load
from forerun.errors import UserError
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.verbs.export import write_model as exporting
from forerun.verbs.export.export import export
from forerun.verbs.export.folder import reserved
from forerun.weights_io import documents

TEXT = "All work and no play makes a dull model; " * 60


def trained(folder: Path, model: str, *more: str) -> Path:
    """A run of two steps on bytes."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "job.yaml").write_text(
        f"name: run\nmodel: {model}\ndata: {{path: text.txt, tokenizer: bytes}}\nsequence: 32\nbatch: 8\nsteps: 2\n"
        f"device: cpu\nsample: {{tokens: 0}}\noptimizer: {{lr: 1.0e-2, warmup: 0}}\nruns: {folder / 'runs'}\n"
    )
    job = load(folder / "job.yaml", list(more)).job
    with make_display(io.StringIO()) as display:
        train(job, display)
    return folder / "runs" / "run"


FREE = "{layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 48, tied: false}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("scratch"), FREE)


@pytest.fixture(scope="module")
def base(scratch: Path) -> Path:
    """A checkpoint to start from: bfloat16, in the names of Llama."""
    return export(str(scratch), str(scratch.parent / "base"), dtype="bfloat16").folder


def test_a_second_export_into_a_folder_is_refused_before_it_reads_weights(scratch: Path, tmp_path: Path) -> None:
    reporter = RecordingReporter()
    with reserved(tmp_path / "out"), pytest.raises(UserError) as error:
        export(str(scratch), str(tmp_path / "out"), reporter=reporter)
    assert error.value.code == "E-RUN-091"
    assert not any("weights" in line for line in reporter.lines)
    assert list(tmp_path.iterdir()) == []


def test_from_scratch(scratch: Path, tmp_path: Path) -> None:
    done = export(str(scratch), str(tmp_path / "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["dtype"], config["hidden_size"]) == ("llama", "float32", 32)
    assert "to the last bit." in done.proof
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype("float32")}
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (32, 32)
    card = (tmp_path / "out/README.md").read_text()
    assert "Trained from scratch" in card
    assert str(tmp_path.parent) not in card, "folders of this machine stay here"
    assert (tmp_path / "out/loss.svg").read_text().startswith("<svg")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_bytes_are_bytes_in_the_tokenizer_that_is_written() -> None:
    every = "".join(chr(n) for n in (*range(128), 0xE9, 0x20AC, 0x1F600))
    inner = documents.byte_tokenizer()
    assert inner.encode(every, add_special_tokens=False).ids == list(every.encode())
    assert inner.token_to_id(documents.BYTE_END) == 256
    assert inner.decode(list(every.encode())) == every


def test_trained_from_a_checkpoint(base: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, str(base))
    done = export(str(run), str(tmp_path / "out"))
    assert "21 of 21" in done.proof
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert {name: (x.dtype, x.shape) for name, x in before.items()} == {
        name: (x.dtype, x.shape) for name, x in after.items()
    }
    moved = [np.abs(after[name].astype(np.float32) - before[name].astype(np.float32)).max() for name in before]
    assert 1e-4 < min(moved) <= max(moved) < 0.1, "two steps of at most 0.01 from where it began"


def test_weights_that_did_not_move_are_told(base: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, str(base), "optimizer.lr=1e-30", "optimizer.weight_decay=0")
    with raises_error("E-RUN-023", "16", "21") as raised:
        export(str(run), str(tmp_path / "out"))
    assert raised.value.fix
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("damage", ["bit", "config", "tokenizer"])
def test_what_is_written_wrongly_never_counts(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """One flipped bit in one weight, another epsilon in config.json, another tokenizer."""
    writing = exporting.write_params

    def spoiled(folder: Path, *rest: Any, **more: Any) -> Any:
        written = writing(folder, *rest, **more)
        if damage == "bit":
            tensors = load_file(folder / "model.safetensors")
            name = "model.layers.0.mlp.up_proj.weight"
            tensors[name].view(np.uint32)[3, 5] ^= 1 << 9
            save_file(tensors, folder / "model.safetensors")
        return written

    config = documents.config_json
    monkeypatch.setattr(exporting, "write_params", spoiled)
    if damage == "config":
        monkeypatch.setattr(documents, "config_json", lambda *given: config(*given) | {"rms_norm_eps": 0.1})
    if damage == "tokenizer":
        tokenizer = documents.byte_tokenizer
        monkeypatch.setattr(documents, "byte_tokenizer", lambda: _lower(tokenizer()))
    with raises_error("E-RUN-023"):
        export(str(scratch), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def _lower(inner: Any) -> Any:
    from tokenizers import normalizers

    inner.normalizer = normalizers.Lowercase()
    return inner


def test_nothing_is_written_over(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("mine")
    with raises_error("E-RUN-022"):
        export(str(scratch), str(tmp_path / "out"))
    assert (tmp_path / "out/precious").read_text() == "mine"
    with raises_error("E-RUN-020"):
        export(str(tmp_path), str(tmp_path / "other"))


def test_the_average_is_exported_where_there_is_one(tmp_path: Path) -> None:
    run = trained(tmp_path, FREE, "optimizer.ema=0.5")
    export(str(run), str(tmp_path / "out"))
    from forerun.checkpoint.store import CheckpointStore
    from forerun.hardware.devices import choose
    from forerun.run.run_devices import program_on

    job = load(run / "job.yaml").job
    program = program_on(ResolvedJob(job), choose("cpu", None), None)
    with CheckpointStore(run / "checkpoints", keep=2) as store:
        state = store.restore(2, program.state)
    written = load_file(tmp_path / "out/model.safetensors")["model.norm.weight"]
    assert np.array_equal(written, jax.device_get(state.average.norm))
    assert not np.array_equal(written, jax.device_get(state.params.norm))
