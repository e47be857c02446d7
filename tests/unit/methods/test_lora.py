"""Adapters: which matrices get one, what is left out by dropout, what is kept and what must not change."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_assertions import raises_error
from safetensors.numpy import load_file, save_file

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.config.training_method import Lora
from forerun.errors import UserError
from forerun.hardware.devices import choose
from forerun.methods.lora import LoraTransform
from forerun.models.model_facts import ModelFacts, model_of
from forerun.nn import spec
from forerun.nn.weights import lowrank
from forerun.nn.weights.dense import Dense
from forerun.nn.weights.lowrank import LowRank
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.run_devices import program_on
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics
from forerun.trained_model.base_weights import read_file_weights
from forerun.trained_model.load_model import load_model
from forerun.verbs.export.export import export
from forerun.weights_io.adapter import adapters_of

TEXT = "All work and no play makes a dull model; " * 60
FREE = "{layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 48, vocab: 257, tied: false}"
ATTENTION, MLP = (
    {"blocks.query", "blocks.key", "blocks.value", "blocks.out"},
    {"blocks.gate", "blocks.up", "blocks.down"},
)


def job_in(folder: Path, *more: str, model: str = FREE, lora: str = "{rank: 4, base: float32}") -> Job:
    (folder / "text.txt").write_text(TEXT)
    (folder / "job.yaml").write_text(
        f"name: run\nmodel: {model}\ndata: {{path: text.txt, tokenizer: bytes}}\nsequence: 32\nbatch: 8\nsteps: 4\n"
        f"device: cpu\ndevices: 1\nsample: {{tokens: 0}}\noptimizer: {{lr: 1.0e-2, warmup: 0}}\nlora: {lora}\n"
        f"checkpoint: {{every: 2}}\nprecision: {{compute: float32}}\nruns: {folder / 'runs'}\n"
    )
    return load(folder / "job.yaml", list(more)).job


def run(job: Job) -> Any:
    with make_display(io.StringIO()) as display:
        finished = train(job, display)
    assert finished is not None
    return finished


def losses(job: Job) -> list[float]:
    return [row["loss"] for row in read_metrics(Path(job.runs) / job.name / "metrics.jsonl")]


def cut(job: Job) -> None:
    """As if it had been killed before its last commit."""
    max((Path(job.runs) / job.name / "checkpoints" / "commits").glob("*.json")).unlink()


def same(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to adapt, in the names of Llama."""
    folder = tmp_path_factory.mktemp("base")
    job = job_in(folder, "steps=1").model_copy(update={"lora": None})
    run(job)
    return export(str(folder / "runs/run"), str(folder / "base")).folder


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", ATTENTION | MLP),
        ("blocks.*", ATTENTION | MLP),
        (["q_proj", "value"], {"blocks.query", "blocks.value"}),
        (["model.layers.*.mlp.*"], MLP),
        (["*_proj"], ATTENTION | MLP),
    ],
)
def test_targets_by_any_of_their_names(targets: Any, expected: set[str], tmp_path: Path) -> None:
    job = job_in(tmp_path)
    transform = LoraTransform(Lora(targets=targets), "float32", ModelFacts(job.model).module_names)
    assert set(adapters_of(transform.specs(model_of(job.model).specs()))) == expected


def test_a_target_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    transform = LoraTransform(Lora(targets=["q_prj"]), "float32", ModelFacts(job.model).module_names)
    with raises_error("E-METHOD-003", "'q_prj'") as refused:
        transform.specs(model_of(job.model).specs())
    assert "q_proj" in (refused.value.why or "")
    names = ModelFacts(job.model).module_names
    for name in ("head", "lm_head", "embed", "norm"):
        with pytest.raises(UserError):
            LoraTransform(Lora(targets=[name]), "float32", names).specs(model_of(job.model).specs())


def adapter(dropout: float) -> tuple[LowRank[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    made = LowRank(
        base=Dense(jax.random.normal(keys[0], (3, 16, 2, 4))),
        down=jax.random.normal(keys[1], (3, 16, 5)),
        up=jax.random.normal(keys[2], (3, 5, 2, 4)),
        inputs=1,
        scale=0.5,
        dropout=dropout,
    )
    return made, jax.random.normal(keys[3], (2, 7, 16))


def test_dropout_leaves_the_expectation_and_the_base_alone() -> None:
    stacked, x = adapter(0.25)
    one = jax.tree.map(lambda leaf: leaf[1], stacked)
    without = one.contract("BSE,EHD->BSHD", x)
    expected = jnp.einsum("BSE,EHD->BSHD", x, one.matrix("EHD", jnp.float32))
    np.testing.assert_allclose(without, expected, rtol=1e-4, atol=1e-4)

    def dropped(key: jax.Array) -> jax.Array:
        layers = lowrank.noisy({"q": stacked}, key)["q"]
        return jax.tree.map(lambda leaf: leaf[1], layers).contract("BSE,EHD->BSHD", x)

    many = jax.vmap(dropped)(jax.random.split(jax.random.key(7), 4000))
    spread = np.asarray(many.std(0)) / np.sqrt(len(many))
    assert np.abs(np.asarray(many.mean(0) - without)).max() < 5 * spread.max()
    assert spread.max() > 0.01
    np.testing.assert_array_equal(dropped(jax.random.key(3)), dropped(jax.random.key(3)))
    layers = lowrank.noisy({"q": stacked}, jax.random.key(3))["q"].noise
    assert len({tuple(np.asarray(row)) for row in layers}) == 3, "each layer has a mask of its own"


def test_dropout_counts_in_a_step_and_not_at_evaluation(tmp_path: Path) -> None:
    looked, stepped = [], []
    for dropout in (0.0, 0.5):
        job = job_in(tmp_path, lora=f"{{rank: 4, base: float32, dropout: {dropout}}}")
        program = program_on(ResolvedJob(job), choose("cpu", 1), 100)
        state = program.initial_state(0)
        ups = jax.tree.map(lambda x: x + 0.05, spec.split(state.params, program.unsaved)[1])
        state = replace(state, params=spec.merge(ups, state.params))
        batch = jax.tree.map(lambda like: jnp.ones(like.shape, like.dtype), program.batch)
        looked.append(float(jax.jit(program.evaluate)(state.params, batch).loss))
        step = jax.jit(program.step)
        stepped.append([float(step(state, batch, program.schedule)[1].loss) for _ in range(2)])
    assert looked[0] == looked[1]
    for first, again in stepped:
        assert first == again, "same step, same mask"
    assert stepped[0] != stepped[1]


def test_every_step_has_its_own_dropout(tmp_path: Path) -> None:
    """The weights and the batch are the same in all steps, so that only the mask can change the loss."""
    program = program_on(
        ResolvedJob(job_in(tmp_path, lora="{rank: 4, base: float32, dropout: 0.5}")), choose("cpu", 1), 100
    )
    state = program.initial_state(0)
    ups = jax.tree.map(lambda x: x + 0.05, spec.split(state.params, program.unsaved)[1])
    state = replace(state, params=spec.merge(ups, state.params))
    batch = jax.tree.map(lambda like: jnp.ones(like.shape, like.dtype), program.batch)
    step = jax.jit(program.step)
    states = [replace(state, step=jnp.int32(number)) for number in (0, 1, 2, 0, 1, 2)]
    found = [float(step(one, batch, program.schedule)[1].loss) for one in states]
    assert len(set(found)) == 3
    assert found[:3] == found[3:], "a repeated step has the same mask"


@pytest.mark.parametrize(
    "lora",
    [
        "{rank: 4, dropout: 0.3, dora: true}",
        pytest.param("{rank: 4, base: nf4, block: 16}", marks=pytest.mark.slow),
    ],
)
def test_resumed_it_is_the_same_run(lora: str, tmp_path: Path) -> None:
    jobs = [job_in(tmp_path, f"name={name}", lora=lora) for name in ("straight", "stopped")]
    straight, _ = run(jobs[0]), run(jobs[1])
    cut(jobs[1])
    resumed = run(jobs[1])
    assert resumed.summary["resumed_at"] == 2
    same(straight.state, resumed.state)
    assert losses(jobs[0]) == losses(jobs[1])


def test_only_adapters_are_saved_and_have_moments(base: Path, tmp_path: Path) -> None:
    job = job_in(tmp_path, "steps=2", model=str(base))
    state = run(job).state
    rank, E, F, KD = 4, 32, 48, 16
    learned = 2 * rank * ((E + E) + 2 * (E + KD) + (E + E) + 2 * (E + F) + (F + E))
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * learned
    files = [path for path in (tmp_path / "runs/run/checkpoints").rglob("*") if path.is_file()]
    # The arrays, without the records of orbax: these contain the name of every array and grow with each version.
    array_bytes = sum(path.stat().st_size for path in files if "d" in path.parent.parts[-1:])
    assert 3 * 4 * learned < array_bytes < 3 * 4 * learned + 20_000
    assert (base / "model.safetensors").stat().st_size > 120_000


def test_the_gradient_of_the_read_out_is_not_computed(tmp_path: Path) -> None:
    texts = []
    for lora in (True, False):
        job = job_in(tmp_path, "devices=2")
        job = job if lora else job.model_copy(update={"lora": None})
        texts.append(program_on(ResolvedJob(job), choose("cpu", 2), 100).trace().lower().compile().as_text())
    assert ["BCV,BCE->VE" in text for text in texts] == [False, True]


def test_a_changed_base_is_refused(base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "base"
    copy.mkdir()
    for path in base.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    job = job_in(tmp_path, model=str(copy))
    run(job)
    cut(job)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].copy()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-4
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"E-RUN-0(29|36)"):
        run(job)


def test_merged_exported_and_asked(base: Path, tmp_path: Path) -> None:
    job = job_in(tmp_path, model=str(base), lora="{rank: 4, base: float32, targets: [q_proj, down_proj]}")
    state = run(job).state
    folder = str(tmp_path / "runs/run")
    done = export(folder, str(tmp_path / "merged"), merge=True)
    assert "4 of 21" in done.proof
    plain = lowrank.plain(state.params, "float32")
    same(load_model(folder, device="cpu", devices=1).params.blocks.query, plain.blocks.query)
    with raises_error("E-RUN-019", "--dtype", "bfloat16"):
        export(folder, str(tmp_path / "peft"), dtype="bfloat16")


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("rank: 8", "rank is 4 there, 8 here"),
        ("rank: 4, alpha: 8", "alpha is 16 there, 8 here"),
        ("rank: 4, targets: [q_proj]", "targets there and not here: down_proj, gate_proj"),
        ("rank: 4, rslora: true", "rslora is False there, True here"),
        ("rank: 4, dora: true", "dora is False there, True here"),
    ],
)
def test_a_peft_folder_of_another_kind_is_refused(
    lora: str, said: str, adapted: Path, base: Path, tmp_path: Path
) -> None:
    job = job_in(tmp_path, model=str(base), lora=f"{{{lora}, start: {adapted}}}")
    with raises_error("E-RUN-004") as refused:
        read_file_weights(ResolvedJob(job), program_on(ResolvedJob(job), choose("cpu", 1), 100))
    assert said in (refused.value.why or "")


@pytest.fixture(scope="module")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    run(job_in(folder, model=str(base)))
    return export(str(folder / "runs/run"), str(folder / "peft")).folder


def test_out_and_in_again_is_exact(adapted: Path, base: Path, tmp_path: Path) -> None:
    job = job_in(tmp_path, "steps=1", "optimizer.lr=1e-30", model=str(base), lora=f"{{rank: 4, start: {adapted}}}")
    run(job)
    export(str(tmp_path / "runs/run"), str(tmp_path / "peft"))
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (adapted, tmp_path / "peft"))
    assert one.keys() == two.keys()
    assert len(one) == 2 * 2 * 7
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, two[name])


def test_no_peft_folder(base: Path, tmp_path: Path) -> None:
    job = job_in(tmp_path, model=str(base), lora="{rank: 4, start: ./nowhere}")
    with pytest.raises(UserError, match="nowhere is not a PEFT folder"):
        read_file_weights(ResolvedJob(job), program_on(ResolvedJob(job), choose("cpu", 1), 100))


def test_blocks_must_divide(tmp_path: Path) -> None:
    job = job_in(tmp_path, lora="{base: int4, block: 64}")
    with raises_error("E-METHOD-001", "lora.block=64", "blocks.query") as refused:
        run(job)
    assert refused.value.fix == "set lora.block=32"


def test_specs_of_a_quantized_base(tmp_path: Path) -> None:
    job = job_in(tmp_path, lora="{rank: 4, base: nf4, block: 16}")
    program = program_on(ResolvedJob(job), choose("cpu", 4), 100)
    query = program.state.params.blocks.query
    assert query.base.codes.dtype == jnp.uint8
    assert query.base.codes.shape == (2, 2, 8, 32)
    assert program.state.params.embed.dtype == program.state.params.head.value.dtype == jnp.bfloat16
    assert not any(leaf.size == 0 for leaf in jax.tree.leaves(program.learning))
    assert spec.count(program.model.specs()) > sum(leaf.size for leaf in jax.tree.leaves(program.learning))
