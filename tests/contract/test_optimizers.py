"""Every optimizer in complete runs: state on a mesh, its size, resume to the last bit, adapters, and custom code."""

from __future__ import annotations

import io
import os
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import assert_error

from forerun.cli.main import main
from forerun.config.load import load
from forerun.config.schema import Job, Precision
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.models.model_facts import model_of
from forerun.models.plugin import use_job_folder
from forerun.nn import sharding
from forerun.program.build import Program, build, make_mesh, program_hash
from forerun.program.state import resting
from forerun.reporter import LineReporter
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run import train as loop

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "optimizer"
NAMES = ("adamw", "muon", "adafactor", "lion", "adamw8bit")
# CI runs those whose state no other optimizer has. With ALL_OPTIMIZERS=1 in the environment, all of them run.
IN_CI = ("muon", "adamw8bit", "signum", "adamw8bit with lora")
ALL = bool(os.environ.get("ALL_OPTIMIZERS"))
# Wide enough for blocks of 8-bit codes (64 x 2 x 32 elements in a layer), and layers that divide on the mesh.
MODEL = {"layers": 2, "embed": 64, "heads": 2, "mlp": 128, "vocab": 128, "tied": False}
MESH = MeshShape(1, 2, 2)
FIELDS: dict[str, Any] = {
    "data": "unread",
    "sequence": 8,
    "batch": 4,
    "steps": 10,
    "precision": Precision(compute="float32"),
    "remat": "none",
}


def job_of(name: str, **fields: Any) -> Job:
    optimizer = {"name": name, "ema": 0.9, "warmup": 0.0, "lr": 0.01, **fields.pop("optimizer", {})}
    return Job(model=MODEL, optimizer=optimizer, **FIELDS | fields)


def built(job: Job, shape: MeshShape = MESH) -> Program:
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    return build(ResolvedJob(job), mesh, derive(job, shape, None))


@pytest.fixture
def _split_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 256)


def expected_bytes(name: str) -> int:
    """The optimizer's arrays by formula: moments, factors or codes of each parameter, and the average."""
    layers, E, H, D, F, V = 2, 64, 2, 32, 128, 128
    matrices = [(E, H * D), (E, H * D), (E, H * D), (H * D, E), (E, F), (E, F), (F, E)]
    tables, norms = [(V, E), (V, E)], [E] + [E] * 2 * layers
    linear = layers * sum(rows * columns for rows, columns in matrices)
    every = linear + 2 * V * E + sum(norms)
    state = {
        "adamw": 2 * 4 * every,
        "lion": 4 * every,
        "muon": 4 * linear + 2 * 4 * (every - linear),
        "adafactor": 4 * (layers * sum(map(sum, matrices)) + sum(map(sum, tables)) + sum(norms)),
        # Two codes per element, and two scales per block: of 32 for q, k, v (D), of 64 or 128 for the others.
        "adamw8bit": 2 * (linear + 2 * V * E)
        + 2 * 4 * layers * (3 * E * H + H * D + 2 * E + F) + 2 * 4 * 2 * V + 2 * 4 * sum(norms),
    }  # fmt: skip
    return state[name] + 4 * every


@pytest.mark.usefixtures("_split_small_weights")
@pytest.mark.parametrize("name", [name for name in NAMES if ALL or name in IN_CI])
def test_the_state_is_split_counted_and_the_same_on_a_mesh(name: str) -> None:
    job = job_of(name)
    assert resting(ResolvedJob(job)).optimizer_bytes == expected_bytes(name)
    after = []
    for shape in (MeshShape(1, 1, 1), MESH):
        program = built(job, shape)
        state = program.initial_state(0)
        batch = jax.tree.map(lambda x: _tokens(x), program.batch)
        lowered = program.trace().lower()
        step = lowered.compile()
        arguments = sum(_local_bytes(leaf) for leaf in jax.tree.leaves((program.state, program.batch)))
        scalars = len(jax.tree.leaves(program.schedule))
        assert step.memory_analysis().argument_size_in_bytes == pytest.approx(arguments + 4 * scalars, abs=64)
        for _ in range(2):
            state, metrics = step(state, batch, program.placed_schedule())
        after.append(jax.tree.map(np.asarray, state.params))
        assert np.isfinite(float(metrics.loss))
    optimizer = program.state.optimizer
    split = sum(_local_bytes(leaf) for leaf in jax.tree.leaves(optimizer))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(optimizer))
    # Norms and Adafactor's factors are small: they are not split over fsdp.
    assert split < whole * (0.9 if name == "adafactor" else 0.35)
    for one, other in zip(*map(jax.tree.leaves, after), strict=True):
        # An element whose gradient is near zero has an update of any sign.
        assert np.mean(np.abs(one - other) > 1e-4) < 0.002


def _local_bytes(leaf: Any) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize


def _tokens(x: Any) -> Any:
    values = np.arange(x.size).reshape(x.shape) * 7 % 97 + 1
    return jax.device_put((values if x.dtype == np.int32 else np.ones(x.shape)).astype(x.dtype), x.sharding)


JOB = """\
model: {layers: 1, embed: 64, heads: 2}
data: text
sequence: 16
batch: 8
micro_batch: 4
steps: 6
device: cpu
devices: 1
precision: {compute: float32}
remat: none
checkpoint: {every: 3, keep: 5}
sample: {tokens: 0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("optimizers")
    (found / "text").mkdir()
    (found / "text" / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    (found / "job.yaml").write_text(JOB)
    shutil.copy(EXAMPLE / "signum.py", found)
    return found


def trained(job: Job) -> loop.TrainResult:
    finished = loop.train(job, LineReporter(io.StringIO(), clock=time.monotonic))
    assert finished is not None
    return finished


RUNS = {
    "muon": ["optimizer.name=muon", "optimizer.lr=3e-3", "optimizer.groups=[{match: '*norm', weight_decay: 0.1}]"],
    "adafactor": ["optimizer.name=adafactor", "optimizer.schedule=inverse_sqrt"],
    "lion": ["optimizer.name=lion", "optimizer.lr=1e-3", "optimizer.schedule=cosine_restarts"],
    "adamw8bit": ["optimizer.name=adamw8bit", "optimizer.lr=3e-3", "optimizer.schedule=wsd"],
    "signum": ["optimizer.name=signum:signum", "optimizer.lr=1e-3", "optimizer.groups=[{match: embed, lr_scale: 0.5}]"],
    "muon with lora": ["optimizer.name=muon", "optimizer.lr=3e-3", "lora.rank=4", "optimizer.ema=null"],
    "adamw8bit with lora": ["optimizer.name=adamw8bit", "optimizer.lr=3e-3", "lora.rank=64", "optimizer.ema=null"],
}


@pytest.mark.parametrize("name", [name for name in RUNS if ALL or name in IN_CI])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with accumulation, a moving average and the guard. The run checks that it compiles only once."""
    monkeypatch.chdir(folder)
    use_job_folder(folder)
    short = name.replace(" ", "-")
    words = ["optimizer.ema=0.9", *RUNS[name], f"name={short}"]
    first = trained(load("job.yaml", words).job)
    assert first.summary["final_loss"] < first.summary["first_loss"]
    run = folder / "runs" / short
    shutil.copytree(run, folder / "runs" / f"{short}-resumed")
    again = folder / "runs" / f"{short}-resumed"
    sorted((again / "checkpoints" / "commits").iterdir())[-1].unlink()
    (again / "summary.json").unlink()
    second = trained(load("job.yaml", [*words, f"name={short}-resumed"]).job)
    assert second.summary["resumed_at"] == 3
    for one, other in zip(*(jax.tree.leaves(made.state) for made in (first, second)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if name == "signum":
        assert (run / "code.json").exists()
        # An export needs the weights only, so it works without the code of the optimizer.
        monkeypatch.setattr("forerun.program.optimizer.chain", None)
        assert main(["export", str(run), "--to", str(folder / "exported")]) == 0
    use_job_folder(None)


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)
    use_job_folder(EXAMPLE)
    words = ["device=cpu", "devices=1", f"data.store={tmp_path / 'store'}", f"runs={tmp_path / 'runs'}", "steps=6"]
    words += ["sequence=64", "model.layers=1", "model.embed=16"]
    finished = trained(load("job.yaml", words).job)
    assert finished.summary["final_loss"] < finished.summary["first_loss"]
    use_job_folder(None)


def test_numbers_of_groups_and_schedules_are_no_part_of_the_program() -> None:
    def hashed(**optimizer: Any) -> str:
        return program_hash(built(job_of("lion", optimizer=optimizer)).trace().lower())

    groups = [{"match": "embed", "lr_scale": 0.1, "weight_decay": 0.0}]
    others = [{"match": "embed", "lr_scale": 0.7, "weight_decay": 0.4}]
    base = hashed(schedule="wsd", groups=groups)
    assert base == hashed(schedule="wsd", decay=0.5, lr=0.1, groups=others)
    assert base != hashed(schedule="wsd", groups=[{"match": "head", "lr_scale": 0.1, "weight_decay": 0.0}])


def test_groups_find_names_of_forerun_and_transformers() -> None:
    from forerun.config.optimizer import ParamGroup
    from forerun.methods.optimizer_parameters import group_numbers
    from forerun.models.model_facts import ModelFacts

    job = job_of("adamw")
    specs, names = model_of(job.model).specs(), ModelFacts(job.model).module_names

    def matched(pattern: Any) -> set[str]:
        found = group_numbers(specs, [ParamGroup(match=pattern)], names)
        flat = jax.tree_util.tree_leaves_with_path(found)
        return {jax.tree_util.keystr(path) for path, number in flat if number == 0}

    assert matched("embed") == matched("embed_tokens") == {".embed"}
    assert matched("q_proj") == matched("query") == matched("blocks.query") == {".blocks.query.value"}
    assert matched("*norm") == {".norm", ".blocks.attention_norm", ".blocks.mlp_norm"}
    assert matched(("head", "embed")) == {".head.value", ".embed"}
    with pytest.raises(UserError) as caught:
        matched("wte")
    assert_error(caught.value, "E-METHOD-030", what="'wte'", why="blocks.query")


def test_groups_find_the_matrices_of_adapters() -> None:
    """LoRA+ has a larger learning rate for the second matrix of each adapter."""
    job = job_of("adamw", lora={"rank": 2}, optimizer={"groups": [{"match": "lora_B", "lr_scale": 16.0}]})
    assert built(job).schedule.groups[0].lr_scale == 16.0
    with pytest.raises(UserError) as caught:
        built(job_of("adamw", lora={"rank": 2}, optimizer={"groups": [{"match": "embed", "lr_scale": 2.0}]}))
    assert_error(caught.value, "E-METHOD-030", why="blocks.query.up")


def test_muon_without_a_matrix_is_refused() -> None:
    from forerun.methods.optimizer_parameters import ParamLayout
    from forerun.program import optimizer
    from forerun.program.schedule import Schedule

    o = job_of("muon").optimizer
    layouts = {"table": ParamLayout((8, 4), "VE", 0, 1, False)}
    with pytest.raises(UserError) as caught:
        optimizer.chain(o, Schedule.of(o, 4, 0), {"table": True}, layouts)
    assert_error(caught.value, "E-PROGRAM-010")
