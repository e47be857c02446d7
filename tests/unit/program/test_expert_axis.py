"""Steps of a model with experts on several devices and slices equal those on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import assert_error

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.models import sizes
from forerun.models.decoder_config import ExpertConfig
from forerun.models.layer_kinds import LayerKind, LayerShape
from forerun.models.sizes import delta_shape
from forerun.nn import routing, sharding
from forerun.nn.rope import Rope
from forerun.objectives.next_token import BALANCE, ENTROPY, LOAD
from forerun.program.build import program_of
from forerun.program.state import State
from forerun.resolve.resolved_job import ResolvedJob

NAME, HYBRID = "qwen3-30b-a3b", "qwen3.5-35b-a3b"  # the second has gated delta layers and a shared expert
BESIDE = "gemma-4-26b-a4b"  # experts beside an MLP, and two shapes of attention
ROWS, LENGTH, VOCAB = 16, 16, 128
LORA = {"rank": 4, "alpha": 8}
OPTIMIZER = {"lr": 3e-3, "warmup": 0.0, "eps": 1e-6}
LARGE_EPSILON = OPTIMIZER | {"eps": 1e-5}  # some gradients are near 1e-6, and AdamW would amplify their rounding
ONE = MeshShape(1, 1, 1)
TOLD = (BALANCE, ENTROPY, LOAD)
Trained = tuple[list[float], list[dict[str, float]], State]


@pytest.fixture(autouse=True)
def _tiny_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four experts in two layers. Small weights are split, and a device may need several rounds."""
    experts = ExpertConfig(count=4, top=2, mlp=24, balance_loss=0.02)
    tiny = replace(
        sizes.SIZES[NAME], layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=8, vocab=VOCAB, experts=experts
    )
    monkeypatch.setitem(sizes.SIZES, NAME, tiny)
    rope = Rope(1e4, 4, None)
    kinds = LayerKind(None, None, delta_shape(4, 2, 8, 8, 4)), LayerKind(None, rope, LayerShape("full"))
    hybrid = replace(
        sizes.SIZES[HYBRID], layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=16, vocab=VOCAB, rope_dims=4,
        kinds=kinds, experts=replace(experts, shared=True),
    )  # fmt: skip
    monkeypatch.setitem(sizes.SIZES, HYBRID, hybrid)
    near = LayerKind(8, Rope(1e4, 8), LayerShape("sliding"))
    far = LayerKind(None, Rope(1e6, 16), LayerShape("full", head_dim=16, kv_heads=1, key_is_value=True))
    both = replace(
        sizes.SIZES[BESIDE], layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=16, vocab=VOCAB,
        kinds=(near, far), experts=replace(experts, beside=True),
    )  # fmt: skip
    monkeypatch.setitem(sizes.SIZES, BESIDE, both)
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 256)
    monkeypatch.setattr(routing, "MULTIPLE", 8)
    monkeypatch.setattr(routing, "ROOM", 0.8)


def trained(shape: MeshShape, steps: int = 2, **fields: Any) -> Trained:
    """Return the losses, the routers' metrics and the state after some steps on fixed batches."""
    given: dict[str, Any] = {
        "model": NAME,
        "data": "unread",
        "sequence": LENGTH,
        "batch": ROWS,
        "micro_batch": 2,
        "steps": 4,
        "precision": {"compute": "float32"},
        "optimizer": OPTIMIZER,
    }
    made = program_of(ResolvedJob(Job.model_validate(given | fields)), shape, jax.devices()[: shape.devices])
    draw = np.random.default_rng(0)
    with jax.set_mesh(made.mesh):
        compiled = made.trace().lower().compile()
        state, losses, told = made.initial_state(0), [], []
        for _ in range(steps):
            tokens = draw.integers(0, VOCAB, (ROWS, LENGTH))
            arrays = {
                "tokens": tokens,
                "targets": np.roll(tokens, -1, 1),
                "weights": draw.random((ROWS, LENGTH)),  # other sums of weights on each device
                "segments": np.ones((ROWS, LENGTH)),
                "positions": np.tile(np.arange(LENGTH), (ROWS, 1)),
            }
            placed = {
                name: jax.device_put(x.reshape(like.shape).astype(like.dtype), like.sharding)
                for name, x in arrays.items()
                for like in [getattr(made.batch, name)]
            }
            state, metrics = compiled(state, replace(made.batch, **placed), made.placed_schedule())
            losses.append(float(metrics.loss))
            told.append({name: float(value) for name, value in metrics.told.items()})
    return losses, told, jax.tree.map(np.asarray, state)


def assert_equal(mine: Trained, theirs: Trained, *, routers: bool = True) -> None:
    np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-5)
    assert mine[0][0] != mine[0][-1]
    for one, other in zip(mine[1], theirs[1], strict=True) if routers else ():
        assert set(TOLD) <= one.keys()
        for name in TOLD:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5)
    pairs = zip(jax.tree.leaves(mine[2].params), jax.tree.leaves(theirs[2].params), strict=True)
    assert max(float(np.abs(a - b).max()) for a, b in pairs) < 1e-5


# The balance loss is computed for each micro-batch, so the number of rows in one must be the same on both meshes.
@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        (MeshShape(1, 2, 1, expert=4), {}),
        pytest.param(MeshShape(2, 1, 2, expert=2), {"micro_batch": 4}, marks=pytest.mark.slow),
        pytest.param(MeshShape(1, 2, 2, expert=2), {"micro_batch": 4, "lora": LORA}, marks=pytest.mark.slow),
        pytest.param(
            MeshShape(1, 1, 1, expert=2),
            {"micro_batch": 4, "lora": LORA | {"base": "nf4", "block": 8}},
            marks=pytest.mark.slow,
        ),
        pytest.param(MeshShape(1, 2, 2, expert=2), {"micro_batch": 4, "model": HYBRID}, marks=pytest.mark.slow),
        pytest.param(
            MeshShape(1, 2, 1, expert=2),
            {"micro_batch": 4, "model": HYBRID, "lora": LORA | {"base": "nf4", "block": 8}},
            marks=pytest.mark.slow,
        ),
        pytest.param(MeshShape(1, 2, 2, expert=2), {"micro_batch": 4, "model": BESIDE}, marks=pytest.mark.slow),
        pytest.param(
            MeshShape(1, 2, 1, expert=2),
            {"micro_batch": 4, "model": BESIDE, "lora": LORA | {"base": "nf4", "block": 8}, "optimizer": LARGE_EPSILON},
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        *("fsdp", "data and tp", "adapters, fsdp and tp", "quantized base", "shared", "shared and quantized"),
        *("beside", "beside and quantized"),
    ],
)
def test_steps_with_the_expert_axis_are_those_of_one_device(shape: MeshShape, fields: dict[str, Any]) -> None:
    micro = fields.get("micro_batch", 2) * shape.data_parallel
    assert_equal(trained(shape, **fields), trained(ONE, **{**fields, "micro_batch": micro}))


@pytest.mark.parametrize(
    ("shape", "lora"),
    [
        (MeshShape(1, 2, 1, slices=2, expert=2), None),
        pytest.param(MeshShape(1, 4, 1, slices=2), None, marks=pytest.mark.slow),
        pytest.param(MeshShape(1, 2, 1, slices=2, expert=2), LORA, marks=pytest.mark.slow),
    ],
    ids=["expert axis", "fsdp", "expert axis, adapters"],
)
def test_steps_on_two_slices_are_those_of_one_slice(shape: MeshShape, lora: dict[str, Any] | None) -> None:
    """The balance loss of a micro-batch counts the rows of a slice, so it is 0 here."""
    fields = {"lora": lora, "experts": {"balance_loss": 0.0}}
    one = trained(replace(shape, slices=1), micro_batch=4, **fields)
    assert_equal(trained(shape, **fields), one, routers=False)


@pytest.mark.parametrize(
    ("model", "expert", "code", "what", "fix"),
    [
        ("qwen3-0.6b", 2, "E-HARDWARE-070", "mesh.expert=2", "remove mesh.expert"),
        (NAME, 8, "E-HARDWARE-071", "4 experts", "mesh.expert=4"),
    ],
    ids=["no experts", "not divisible"],
)
def test_what_the_axis_cannot_split_is_rejected(model: str, expert: int, code: str, what: str, fix: str) -> None:
    job = Job.model_validate({"model": model, "data": "unread", "sequence": 16, "batch": 8, "steps": 1})
    with pytest.raises(UserError) as caught:
        ResolvedJob(job).derived(MeshShape(1, 8 // expert, 1, expert=expert))
    assert_error(caught.value, code, what=what, fix=fix)
