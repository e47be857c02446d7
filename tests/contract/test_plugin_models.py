"""What every model owes to the rest of forerun, ours and a user's own alike.

A model of your own is found by its job: every examples/*/job.yaml whose model is a class, at the size it has there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_assertions import raises_error
from spec_shapes import shapes_of

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.models.base import Model
from forerun.models.model_facts import model_of
from forerun.models.sizes import is_plugin
from forerun.nn.compute import Compute
from forerun.nn.spec import ParamSpec, initial, is_spec, map_specs, split
from forerun.objectives.batch import Batch
from forerun.program.build import Program, build, make_mesh
from forerun.program.state import Metrics, State
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
VOCAB, SEQUENCE, BATCH = 64, 16, 8
# The decoder with all its parts. tests/contract/test_families.py tests them in the combinations of real models.
DECODER = {"layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 64, "vocab": VOCAB, "tied": False, "window": 5}
DECODER |= {"qkv_bias": True, "qk_norm": True, "head_dim": 16, "rope_scaling": {"factor": 8.0, "original": 8}}
MODELS: dict[str, dict[str, Any]] = {"decoder": DECODER}
FOUND = [(path.parent.name, load(path).job.model) for path in sorted(EXAMPLES.glob("*/job.yaml"))]
OWN = {
    name: {"name": model.name, "vocab": VOCAB, "options": model.options} for name, model in FOUND if is_plugin(model)
}
MODELS |= OWN
SINGLE = MeshShape(1, 1, 1)
each_model = pytest.mark.parametrize("name", MODELS)


def each_model_with_one_of(argument: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with pairs: each model has one of the values, which take turns."""
    pairs = list(zip(MODELS, cycle(values), strict=False))
    return pytest.mark.parametrize(("name", argument), pairs, ids=[f"{value}-{name}" for name, value in pairs])


@pytest.fixture(autouse=True)
def _plugins_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OWN:
        monkeypatch.syspath_prepend(str(EXAMPLES / name))


def test_the_examples_are_found() -> None:
    assert {"reservoir", "recurrent_depth", "multi_stream"} <= set(OWN)


@pytest.mark.parametrize("name", OWN)
def test_an_example_is_one_short_file(name: str) -> None:
    [module] = (EXAMPLES / name).glob("*.py")
    assert len(module.read_text().splitlines()) < 300
    assert (EXAMPLES / name / "README.md").is_file()


def job_of(name: str, **changes: Any) -> Job:
    given = {
        "model": MODELS[name],
        "data": "unread",
        "sequence": SEQUENCE,
        "batch": BATCH,
        "steps": 4,
        "optimizer": {"lr": 1e-2, "warmup": 0},
        "precision": {"compute": "float32"},
        "remat": "none",
    }
    return Job.model_validate({**given, **changes})


def made(name: str) -> Model:
    return model_of(job_of(name).model)


def parameters(model: Model) -> Any:
    return initial(model.specs(), jax.random.key(0))


def leaves(specs: Any) -> list[ParamSpec]:
    return jax.tree.leaves(specs, is_leaf=is_spec)


@partial(jax.jit, static_argnums=0)
def _logits(model: Model, params: Any, *rows: jax.Array) -> jax.Array:
    return model.apply(params, *rows, Compute()).logits()


def logits(model: Model, params: Any, tokens: Any, segments: Any, positions: Any) -> np.ndarray[Any, Any]:
    return np.asarray(_logits(model, params, *(jnp.asarray(x, jnp.int32) for x in (tokens, segments, positions))))


@cache
def batch() -> Batch[np.ndarray[Any, Any]]:
    """Rows of two documents of different lengths, one accumulation step."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (1, BATCH, SEQUENCE), np.int32)
    second = np.arange(SEQUENCE) >= random.integers(3, SEQUENCE - 3, (1, BATCH, 1))
    first_length = (~second).sum(-1, keepdims=True)
    positions = np.arange(SEQUENCE) - np.where(second, first_length, 0)
    weights = (np.arange(SEQUENCE) != first_length - 1).astype(np.float32)
    return Batch(tokens, np.roll(tokens, -1, -1), weights, second.astype(np.int32) + 1, positions.astype(np.int32))


def program_on(job: Job, shape: MeshShape) -> Program:
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    return build(ResolvedJob(job), mesh, derive(job, shape, None))


def trained(job: Job, shape: MeshShape = SINGLE, steps: int = 3) -> tuple[State, State, list[Metrics]]:
    """(state before, state after, metrics of each step), all on the host."""
    program = program_on(job, shape)
    state = program.initial_state(seed=0)
    before = jax.tree.map(np.array, jax.device_get(state))  # the step takes its argument's memory
    there = jax.tree.map(lambda like, array: jax.device_put(array, like.sharding), program.batch, batch())
    step = program.trace().lower().compile()
    metrics = []
    for _ in range(steps):
        state, figures = step(state, there, program.placed_schedule())
        metrics.append(jax.device_get(figures))
    return before, jax.device_get(state), metrics


@cache
def plain(name: str) -> tuple[State, State, list[Metrics]]:
    """One device, float32, nothing computed twice: what the others are compared with."""
    return trained(job_of(name))


@each_model
def test_specs_are_parameters_with_a_letter_per_dimension(name: str) -> None:
    specs = made(name).specs()
    assert all(isinstance(leaf, ParamSpec) for leaf in leaves(specs))
    assert all(len(leaf.axes) == len(leaf.shape) and leaf.axes.isupper() for leaf in leaves(specs))
    assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(made(name).specs(), is_leaf=is_spec)


@each_model
def test_initial_arrays_have_the_abstract_shapes(name: str) -> None:
    specs = made(name).specs()
    arrays = parameters(made(name))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), arrays) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes_of(specs)
    )
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(arrays))


@each_model
def test_apply_is_pure_and_fits_the_vocabulary(name: str) -> None:
    model, params, rows = made(name), parameters(made(name)), jax.tree.map(lambda x: x[0], batch())
    once, again = (logits(made(name), params, rows.tokens, rows.segments, rows.positions) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert once.shape == (BATCH, SEQUENCE, model.vocab)
    assert model == made(name)
    assert hash(model) == hash(made(name))


@each_model
def test_no_output_depends_on_a_later_token(name: str) -> None:
    model, params = made(name), parameters(made(name))
    tokens = batch().tokens[0]
    ones, positions = np.ones_like(tokens), np.broadcast_to(np.arange(SEQUENCE), tokens.shape)
    before = logits(model, params, tokens, ones, positions)
    for place in (1, 7, SEQUENCE - 1):
        changed = tokens.copy()
        changed[:, place] = (changed[:, place] + 1) % VOCAB
        after = logits(model, params, changed, ones, positions)
        np.testing.assert_allclose(after[:, :place], before[:, :place], rtol=0, atol=1e-6)
        assert (np.abs(after[:, place] - before[:, place]).max(-1) > 1e-4).all()


@each_model
def test_packed_documents_are_as_if_alone(name: str) -> None:
    model, params, rows = made(name), parameters(made(name)), jax.tree.map(lambda x: x[0], batch())
    packed = logits(model, params, rows.tokens, rows.segments, rows.positions)
    alone = np.zeros_like(packed)
    for segment in (1, 2):
        inside = rows.segments == segment
        at_front = np.sort(~inside, axis=-1) == 0  # as many places, moved to the start of an otherwise empty row
        tokens = np.zeros_like(rows.tokens)
        tokens[at_front] = rows.tokens[inside]
        positions = np.where(at_front, np.arange(SEQUENCE), 0)
        alone[inside] = logits(model, params, tokens, at_front, positions)[at_front]
    np.testing.assert_allclose(packed, alone, rtol=1e-5, atol=1e-5)
    one = logits(model, params, rows.tokens, np.ones_like(rows.segments), rows.positions)
    assert np.abs(one - packed).max() > 1e-3, "documents that may see each other must make a difference"


@each_model_with_one_of("shape", [MeshShape(1, 8, 1), MeshShape(2, 2, 2)])
def test_sharded_is_single_device(name: str, shape: MeshShape) -> None:
    _, _, single = plain(name)
    _, _, sharded = trained(job_of(name), shape)
    for ours, theirs in zip(sharded, single, strict=True):
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
        np.testing.assert_allclose(ours.grad_norm, theirs.grad_norm, rtol=1e-4)


@each_model
def test_only_what_is_trainable_changes(name: str) -> None:
    before, after, metrics = plain(name)
    assert metrics[2].loss < metrics[0].loss, "the same batch three times is learned"
    trainable = map_specs(lambda spec: spec.trainable, made(name).specs())
    for old, new, learns in zip(*map(jax.tree.leaves, (before.params, after.params, trainable)), strict=True):
        assert np.array_equal(old, new) != learns


@each_model
def test_the_optimizer_holds_nothing_for_what_is_frozen(name: str) -> None:
    before, _, _ = plain(name)
    trainable = map_specs(lambda spec: spec.trainable, made(name).specs())
    learning, _ = split(before.params, trainable)
    for moment in ("mu", "nu"):
        moments = optax.tree.get(before.optimizer, moment)
        assert [x.shape for x in jax.tree.leaves(moments)] == [x.shape for x in jax.tree.leaves(learning)]


@each_model_with_one_of("remat", ["full", {"policy": "named", "keep": ["mlp_up"]}])
def test_remat_changes_nothing(name: str, remat: Any) -> None:
    _, _, kept = plain(name)
    _, _, again = trained(job_of(name, remat=remat), steps=1)
    np.testing.assert_allclose(again[0].loss, kept[0].loss, rtol=1e-6)
    np.testing.assert_allclose(again[0].grad_norm, kept[0].grad_norm, rtol=1e-5)


@each_model
def test_bfloat16_is_float32_but_for_rounding(name: str) -> None:
    _, _, exact = plain(name)
    _, after, rounded = trained(job_of(name, precision={"compute": "bfloat16"}), steps=1)
    np.testing.assert_allclose(rounded[0].loss, exact[0].loss, rtol=1e-2)
    np.testing.assert_allclose(rounded[0].grad_norm, exact[0].grad_norm, rtol=5e-2)
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {np.dtype(np.float32)}


@each_model
def test_flops_are_those_of_the_matrix_products(name: str) -> None:
    """XLA's attention also multiplies what the causal mask hides, so the count may exceed the statement."""
    model, rows = made(name), jax.tree.map(lambda x: x[0], batch())
    learning, frozen = split(parameters(model), map_specs(lambda spec: spec.trainable, model.specs()))

    def loss(learning: Any) -> jax.Array:
        params = jax.tree.map(lambda a, b: b if a is None else a, learning, frozen, is_leaf=lambda x: x is None)
        out = model.apply(params, rows.tokens, rows.segments, rows.positions, Compute(remat=job_of(name).remat))
        return jnp.sum(jax.nn.logsumexp(out.logits(), axis=-1))

    counted = product_flops(jax.make_jaxpr(jax.grad(loss))(learning).jaxpr) / (BATCH * SEQUENCE)
    stated = model.flops_per_token(SEQUENCE)
    assert stated > 0
    assert 1 / 1.5 < counted / stated < 1.5
    if name in OWN:  # twice the sequence at half of its attention is all of it
        np.testing.assert_allclose(counted, model.flops_per_token(2 * SEQUENCE), rtol=1e-6)


def product_flops(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * equation.outvars[0].aval.size * np.prod([left[d] for d in contracted])
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += times * product_flops(inner)
    return total


@pytest.mark.aot
@each_model
def test_lowers_for_a_slice_without_a_tpu(name: str) -> None:
    from forerun.planner.compile.request import CompileRequest
    from forerun.planner.compile.worker import program_for

    job = job_of(name, sequence=128, precision={}, remat="full")
    lowered = program_for(CompileRequest(ResolvedJob(job), slice_named("v5e-8"))).trace().lower()
    text = lowered.as_text()
    assert "mhlo.num_partitions = 8" in text
    assert ("tpu_custom_call" in text) == (made(name).heads is not None), "attention is the splash kernel"


@pytest.mark.parametrize(
    ("named", "code", "value"),
    [
        ("halfway:Half", "E-MODEL-010", "vocab, specs, apply, flops_per_token"),
        ("halfway:Whole", "E-MODEL-008", "'Whole'"),
        ("nowhere:Half", "E-MODEL-007", "'nowhere'"),
    ],
)
def test_a_plugin_that_lacks_a_part_is_rejected(
    named: str, code: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfway.py").write_text("class Half:\n    heads = None\n    def __init__(self, vocab): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises_error(code, value):
        model_of(Job.model_validate({"model": {"name": named, "vocab": 8}, "data": "x"}).model)


def test_the_reservoir_has_its_spectral_radius() -> None:
    """The largest eigenvalue, asked of LAPACK; it is near the circle's edge for 400 units, not on it."""
    section = {"name": "reservoir:Reservoir", "vocab": 8, "options": {"units": 400, "radius": 0.8, "density": 0.1}}
    model = model_of(Job.model_validate({"model": section, "data": "x"}).model)
    matrix = np.asarray(parameters(model).recurrent.value)
    assert abs(np.abs(np.linalg.eigvals(matrix)).max() / 0.8 - 1) < 0.1
    assert abs(np.count_nonzero(matrix) / matrix.size / 0.1 - 1) < 0.05
