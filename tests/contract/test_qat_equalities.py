"""Rounded weights over devices, over an interruption, under an adapter: none of it changes a number it should not."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import raises_error
from safetensors.numpy import load_file
from test_equalities import ONE, assert_near, built, packed, run

from forerun.checkpoint.reader import Reader, newest_step
from forerun.config.load import load
from forerun.config.schema import Job
from forerun.config.training_method import Lora, Qat
from forerun.hardware.mesh import MeshShape
from forerun.nn import sharding
from forerun.nn.weights.fakequant import FakeQuantized
from forerun.nn.weights.lowrank import LowRank
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.train import train
from forerun.run_folder.run_folder import RunFolder
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics
from forerun.trained_model.load_model import fsdp_mesh, method_params, run_params
from forerun.verbs.export.export import export
from forerun.weights_io.packed import unpack

STEPS = 4


@pytest.fixture(autouse=True)
def _split_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 256)


@pytest.mark.parametrize(
    ("qat", "first"),
    [
        (Qat(weights="int4", group=8, scales="learned"), 1e-5),
        (Qat(weights="int8", group=None, activations="int8"), 1e-4),  # a last bit moves an input by a 127th
    ],
    ids=["int4, learned", "int8, activations"],
)
def test_sharded_is_single_device(qat: Qat, first: float) -> None:
    """Groups of 8 inputs over 8 devices that hold 4 inputs each, and scales over all of them.

    To rounding in the first step. Later a last bit that differs, as it does between kinds of CPU, may carry a weight
    over the middle between two of sixteen levels, and one such weight makes 5e-5 of the loss.
    """
    batches = [packed(16, 32, seed) for seed in range(STEPS)]
    states, expected = run(built(ONE, qat=qat), batches)
    program = built(MeshShape(1, 8, 1), qat=qat)
    gate = program.state.params.blocks.gate.value
    assert gate.sharding.shard_shape(gate.shape) == (2, 4, 64)
    sharded, metrics = run(program, batches)
    ours, theirs = ([float(m.loss) for m in told] for told in (metrics, expected))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=first)
    np.testing.assert_allclose(ours, theirs, rtol=5e-4)
    assert_near(sharded[-1].params, states[-1].params, 1e-3)


def test_scales_learn_and_never_decay() -> None:
    """With a gradient of nothing (no token counts) only decay moves a parameter."""
    qat = Qat(weights="int4", group=8, scales="learned")
    batch = packed(16, 32)
    (before, _, after), _ = run(built(ONE, qat=qat), [replace(batch, weights=0 * batch.weights)] * 2)
    one, other = before.params.blocks.gate, after.params.blocks.gate
    np.testing.assert_array_equal(one.log_scale, other.log_scale)
    assert np.abs(one.value - other.value).max() > 0
    (start, end), _ = run(built(ONE, qat=qat), [batch])
    assert np.mean(start.params.blocks.gate.log_scale != end.params.blocks.gate.log_scale) > 0.9


def test_an_adapter_learns_over_weights_that_rest_rounded() -> None:
    lora = Lora(rank=4, base="float32", targets=("gate", "query"))
    qat = Qat(weights="int4", group=8, targets=("gate", "query", "up"))
    program = built(ONE, qat=qat, lora=lora)
    states, metrics = run(program, [packed(16, 32)] * 3)
    blocks = [state.params.blocks for state in states]
    assert isinstance(blocks[0].gate, LowRank)
    assert isinstance(blocks[0].gate.base, FakeQuantized)
    assert isinstance(blocks[0].up, FakeQuantized)
    for name in ("gate", "query"):
        bases = [np.asarray(getattr(one, name).base.matrix("", np.float32)) for one in blocks]
        np.testing.assert_array_equal(bases[0], bases[-1])
        assert all(len(np.unique(column)) <= 16 for column in bases[0][0, :8].reshape(8, -1).T)
    assert metrics[-1].loss < metrics[0].loss
    learning = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(program.learning)}
    assert learning == {f".blocks.{name}.{half}" for name in ("gate", "query") for half in ("down", "up")}


def job_in(folder: Path, *more: str) -> Job:
    (folder / "text.txt").write_text("All work and no play makes a dull model; " * 60)
    (folder / "job.yaml").write_text(
        "name: run\nmodel: {layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 48, tied: false}\nsequence: 32\n"
        f"data: {{path: text.txt, tokenizer: bytes, store: {folder}/tokens}}\nbatch: 8\nsteps: {STEPS}\ndevice: cpu\n"
        "devices: 1\nsample: {tokens: 0}\noptimizer: {lr: 1.0e-2, warmup: 0}\nprecision: {compute: float32}\n"
        f"remat: none\ncheckpoint: {{every: 2}}\nruns: {folder / 'runs'}\n"
    )
    return load(folder / "job.yaml", list(more)).job


def trained(job: Job) -> Path:
    with make_display(io.StringIO()) as display:
        assert train(job, display) is not None
    return Path(job.runs) / job.name


def params_of(run: Path) -> Any:
    job, folder = load(run / "job.yaml").job, RunFolder(run)
    return method_params(folder, newest_step(folder.checkpoints(job)), ResolvedJob(job), fsdp_mesh(job))


LEARNED = "qat={weights: int4, group: 16, scales: learned}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(job_in(tmp_path_factory.mktemp("qat"), LEARNED))


def test_an_interrupted_run_ends_as_an_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "runs/run")
    checkpoints = tmp_path / "runs/run/checkpoints"
    max((checkpoints / "commits").glob("*.json")).unlink()  # as if it had been killed before its last commit
    assert Reader(checkpoints).steps() == [2]
    again = trained(job_in(tmp_path, LEARNED))
    assert [row["loss"] for row in read_metrics(again / "metrics.jsonl")][-2:] == [
        row["loss"] for row in read_metrics(finished / "metrics.jsonl")
    ][-2:]
    one, other = (jax.tree.leaves(params_of(run)) for run in (finished, again))
    assert [x.tobytes() for x in map(np.asarray, one)] == [x.tobytes() for x in map(np.asarray, other)]


def test_the_codes_in_the_file_are_those_of_the_forward_pass(finished: Path, tmp_path: Path) -> None:
    done = export(str(finished), str(tmp_path / "out"))
    assert "last bit" in done.proof
    tensors, params = load_file(tmp_path / "out/model.safetensors"), params_of(finished)
    for ours, theirs in (("query", "self_attn.q_proj"), ("out", "self_attn.o_proj"), ("down", "mlp.down_proj")):
        leaf = jax.tree.map(lambda x: x[1], getattr(params.blocks, ours))
        used = np.asarray(jax.jit(lambda leaf: leaf.matrix("", np.float32))(leaf))
        name = f"model.layers.1.{theirs}"
        rows, columns = tensors[f"{name}.weight_shape"]
        codes = unpack(tensors[f"{name}.weight_packed"], 4, columns).astype(np.float32)
        scales = np.repeat(tensors[f"{name}.weight_scale"].astype(np.float32), 16, axis=1)
        np.testing.assert_array_equal((codes * scales).T.reshape(used.shape), used)
        assert (rows, columns) == (used.size // columns, columns)
        assert {-8, 7} <= set(codes.astype(int).ravel()), "all of the range is used"
    assert tensors["lm_head.weight"].dtype == tensors["model.norm.weight"].dtype == np.float32


def test_dense_is_the_rounded_weights_as_floats(finished: Path, tmp_path: Path) -> None:
    export(str(finished), str(tmp_path / "out"), dense=True, dtype="bfloat16")
    tensors = load_file(tmp_path / "out/model.safetensors")
    job, folder = load(finished / "job.yaml").job, RunFolder(finished)
    plain = run_params(folder, STEPS, ResolvedJob(job), fsdp_mesh(job), "float32")
    got = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.float32)
    np.testing.assert_allclose(got.T, plain.blocks.up.value[0], rtol=2**-8)
    assert (tmp_path / "out/config.json").read_text().count("quantization_config") == 0


def test_a_code_that_was_written_wrongly_never_counts(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.weights_io import packed as packing

    packed_rightly = packing.pack
    monkeypatch.setattr(packing, "pack", lambda codes, bits: packed_rightly(codes, bits) ^ 1)
    with raises_error("E-RUN-023"):
        export(str(finished), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "code", "values", "fix"),
    [
        ("qat.group=24", "E-METHOD-002", ("qat.group: 24", "32 inputs of blocks.query"), "divisor of 32"),
        ("qat.targets=gait", "E-METHOD-003", ("qat.targets", "'gait'"), "all-linear"),
        ("lora.rank=2", "E-JOB-044", ("qat.scales: learned", "lora"), ""),
    ],
)
def test_impossible_sections_are_rejected(
    change: str, code: str, values: tuple[str, ...], fix: str, tmp_path: Path
) -> None:
    with raises_error(code, *values) as caught:
        trained(job_in(tmp_path, LEARNED, change))
    assert fix in caught.value.fix


def test_what_was_exported_is_the_base_of_a_second_run(finished: Path, tmp_path: Path) -> None:
    """Trained under adapters and exported again: the integers in the file are those of the first run, byte for byte."""
    export(str(finished), str(tmp_path / "first"))
    export(str(finished), str(tmp_path / "dense"), dense=True)
    before = load_file(tmp_path / "first/model.safetensors")
    second = "qat={weights: int4, group: 16}"
    for name in ("first", "dense"):
        job = job_in(tmp_path, second, "lora={rank: 2, alpha: 2, base: float32}", f"model={tmp_path / name}",
                     "data.tokenizer=bytes", f"name=on-{name}", "steps=1")  # fmt: skip
        done = export(str(trained(job)), str(tmp_path / f"again-{name}"))
        assert done.inside is not None
        after = load_file(done.folder / "model.safetensors")
        assert {key: x.tobytes() for key, x in before.items()} == {key: x.tobytes() for key, x in after.items()}
