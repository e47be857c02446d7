"""Optimizers with one state object per parameter, against torch, transformers, Optax and NumPy."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from forerun.config.schema import Optimizer
from forerun.hardware.mesh import MeshShape
from forerun.methods.optimizer_parameters import ParamLayout, layouts_of
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.nn import sharding, spec
from forerun.program import optimizer
from forerun.program.build import make_mesh
from forerun.program.moments import placed
from forerun.program.schedule import Schedule

STEPS = 6
LAYERS = 2
# A stack of tall and one of wide matrices with a dimension of heads, an embedding, and a stack of norms.
LAYOUTS = {
    "tall": ParamLayout((LAYERS, 24, 2, 4), "LEHD", 1, 1, True),
    "wide": ParamLayout((LAYERS, 2, 4, 40), "LHDE", 1, 2, True),
    "embed": ParamLayout((20, 12), "VE", 0, 1, False),
    "norm": ParamLayout((LAYERS, 16), "LE", 1, 0, False),
}
DECAYS = {"tall": True, "wide": True, "embed": True, "norm": False}
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def start() -> Arrays:
    rng = np.random.default_rng(0)
    return {name: (0.1 * rng.normal(size=one.shape)).astype(np.float32) for name, one in LAYOUTS.items()}


@pytest.fixture(scope="module")
def gradients() -> list[Arrays]:
    rng = np.random.default_rng(1)
    return [
        {name: rng.normal(size=one.shape).astype(np.float32) for name, one in LAYOUTS.items()} for _ in range(STEPS)
    ]


def ours(o: Optimizer, start: Arrays, gradients: list[Arrays], groups: Any = None) -> Arrays:
    tx = optimizer.chain(o, Schedule.of(o, STEPS, 0), DECAYS, LAYOUTS, groups)

    @jax.jit
    def step(params: Any, moments: Any, gradient: Any) -> Any:
        return optimizer.update(tx, gradient, moments, params)

    params: Any = {name: jnp.asarray(x) for name, x in start.items()}
    moments = tx.init(params)
    for gradient in gradients:
        params, moments = step(params, moments, {name: jnp.asarray(x) for name, x in gradient.items()})
    return {name: np.asarray(x) for name, x in params.items()}


def matrices(name: str, x: np.ndarray) -> list[np.ndarray]:
    """As torch has them: a list of [out, in] matrices, one for each layer, or of vectors."""
    layout = LAYOUTS[name]
    if not layout.rows:
        return list(x.reshape(LAYERS, -1))
    layers, rows, columns = layout.matrices
    return list(x.reshape(layers, rows, columns).transpose(0, 2, 1))


def by_torch(make: Any, start: Arrays, gradients: list[Arrays]) -> dict[str, list[np.ndarray]]:
    """Every matrix after the steps of a torch optimizer. `make` gets the tensors of one name."""
    import torch

    found = {}
    for name, x in start.items():
        tensors = [torch.nn.Parameter(torch.tensor(one.copy())) for one in matrices(name, x)]
        torch_optimizer = make(tensors, name)
        for gradient in gradients:
            for tensor, one in zip(tensors, matrices(name, gradient[name]), strict=True):
                tensor.grad = torch.tensor(one.copy())
            torch_optimizer.step()
        found[name] = [tensor.detach().numpy() for tensor in tensors]
    return found


def require_equal(got: Arrays, expected: dict[str, list[np.ndarray]], **tolerance: float) -> None:
    for name, wanted in expected.items():
        for one, other in zip(matrices(name, got[name]), wanted, strict=True):
            np.testing.assert_allclose(one, other, err_msg=name, **tolerance)


@pytest.mark.torch
@pytest.mark.parametrize("scale", ["rms", "width"])
def test_muon_is_torch_muon_on_linear_layers_and_adamw_elsewhere(
    scale: str, start: Arrays, gradients: list[Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())  # its products are in bfloat16 otherwise
    o = Optimizer(
        name="muon", lr=0.01, schedule="constant", weight_decay=0.3, clip=None, muon={"scale": scale, "momentum": 0.9}
    )

    def make(tensors: Any, name: str) -> Any:
        if LAYOUTS[name].is_linear:
            adjusted = {"rms": "match_rms_adamw", "width": "original"}[scale]
            return torch.optim.Muon(tensors, lr=0.01, weight_decay=0.3, momentum=0.9, adjust_lr_fn=adjusted)
        decay = 0.3 if DECAYS[name] else 0.0
        return torch.optim.AdamW(tensors, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)

    require_equal(ours(o, start, gradients), by_torch(make, start, gradients), rtol=1e-3, atol=2e-5)


@pytest.mark.torch
@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_adafactor_is_that_of_torch_and_transformers(library: str, start: Arrays, gradients: list[Arrays]) -> None:
    import torch
    import transformers

    o = Optimizer(name="adafactor", lr=0.02, schedule="constant", clip=None)

    def make(tensors: Any, name: str) -> Any:
        if library == "torch":
            return torch.optim.Adafactor(tensors, lr=0.02)
        return transformers.Adafactor(tensors, lr=0.02, scale_parameter=True, relative_step=False)

    require_equal(ours(o, start, gradients), by_torch(make, start, gradients), rtol=1e-4, atol=1e-6)


def test_adafactor_is_that_of_optax_on_one_matrix(start: Arrays, gradients: list[Arrays]) -> None:
    o = Optimizer(name="adafactor", lr=0.02, schedule="constant", clip=None)
    tx = optax.adafactor(0.02, min_dim_size_to_factor=1)
    params: Any = jnp.asarray(start["embed"])
    state = tx.init(params)
    for gradient in gradients:
        updates, state = tx.update(jnp.asarray(gradient["embed"]), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(ours(o, start, gradients)["embed"], params, rtol=1e-5, atol=1e-7)


def lion(x: np.ndarray, gradients: list[np.ndarray], lr: float, b1: float, b2: float, decay: float) -> np.ndarray:
    """The pseudo-code of the paper (Chen et al., 2023, Program 1)."""
    weight, momentum = x.astype(np.float64), np.zeros(x.shape)
    for g in gradients:
        direction = np.sign(b1 * momentum + (1 - b1) * g)
        weight = weight - lr * (direction + decay * weight)
        momentum = b2 * momentum + (1 - b2) * g
    return weight


def test_lion_is_the_papers_pseudo_code(start: Arrays, gradients: list[Arrays]) -> None:
    o = Optimizer(name="lion", lr=0.01, schedule="constant", clip=None)
    assert (o.b1, o.b2, o.weight_decay, o.eps) == (0.9, 0.99, 0.3, None)
    got = ours(o, start, gradients)
    for name, x in start.items():
        expected = lion(x, [g[name] for g in gradients], 0.01, 0.9, 0.99, 0.3 if DECAYS[name] else 0.0)
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "adafactor", "adamw8bit"])
def test_a_group_has_its_own_rate_and_decay(name: str, start: Arrays, gradients: list[Arrays]) -> None:
    """A group is the optimizer with another lr and weight_decay for these parameters only."""
    common = {"name": name, "schedule": "constant", "clip": None}
    groups = {"tall": 0, "wide": -1, "embed": 1, "norm": 1}
    two = ({"match": "a", "lr_scale": 0.5}, {"match": "b", "lr_scale": 2.0, "weight_decay": 0.7})
    got = ours(Optimizer(**common, lr=0.01, weight_decay=0.2, groups=two), start, gradients, groups)
    half = ours(Optimizer(**common, lr=0.005, weight_decay=0.2), start, gradients)
    same = ours(Optimizer(**common, lr=0.01, weight_decay=0.2), start, gradients)
    twice = ours(Optimizer(**common, lr=0.02, weight_decay=0.7), start, gradients)
    for key, expected in (("tall", half), ("wide", same), ("embed", twice)):
        np.testing.assert_allclose(got[key], expected[key], rtol=2e-5, atol=1e-6, err_msg=key)
    plain = ours(Optimizer(**common, lr=0.02, weight_decay=0.0), start, gradients)["norm"]
    assert np.abs(got["norm"] - plain).max() > 1e-4, "a group's own weight decay applies to norms, too"


def test_the_layouts_of_a_decoder() -> None:
    config = DecoderConfig(2, 16, 2, 1, 8, 32, 64, tied=False, qkv_bias=True, qk_norm=True)
    specs = Decoder(config).specs()
    found = layouts_of(specs)
    linear = {name for name in ("query", "key", "value", "out", "gate", "up", "down")}
    flat = {jax.tree_util.keystr(path): one for path, one in jax.tree_util.tree_leaves_with_path(found)}
    assert {name for name, one in flat.items() if one.is_linear} == {f".blocks.{name}.value" for name in linear}
    assert flat[".blocks.query.value"].matrices == (2, 16, 16)
    assert flat[".blocks.out.value"].matrices == (2, 16, 16)
    assert flat[".blocks.out.value"].rows == 2
    assert {name for name, one in flat.items() if one.rows and not one.is_linear} == {".embed", ".head.value"}
    assert jax.tree.structure(found) == jax.tree.structure(specs, is_leaf=spec.is_spec)


WIDE = ParamLayout((LAYERS, 256, 4, 128), "LEHD", 1, 1, True)
SPLIT = PartitionSpec(None, "fsdp", "tp", None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw", {"mu": SPLIT, "nu": SPLIT}),
        ("muon", {"mean": SPLIT}),
        ("adamw8bit", {"mean": SPLIT, "root": SPLIT, "mean_scale": SPLIT, "root_scale": SPLIT}),
        ("adafactor", {"row": PartitionSpec(None, None), "col": PartitionSpec(None, "tp", None)}),
    ],
)
def test_moments_are_split_as_their_parameters(name: str, expected: dict[str, PartitionSpec]) -> None:
    """The factors of Adafactor are too small to be split over fsdp."""
    mesh = make_mesh(MeshShape(2, 2, 2), jax.devices())
    params = {"w": jax.ShapeDtypeStruct(WIDE.shape, jnp.float32, sharding=sharding.stored(mesh, WIDE.shape, WIDE.axes))}
    assert params["w"].sharding.spec == SPLIT
    o, layouts = Optimizer(name=name), {"w": WIDE}
    state = jax.eval_shape(optimizer.chain(o, Schedule.of(o, STEPS, 0), {"w": True}, layouts).init, params)
    specs = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(placed(state, params, layouts, mesh)):
        if "'w'" in (text := jax.tree_util.keystr(path)):
            specs[re.findall(r"\.(\w+)", text)[-1]] = leaf.sharding.spec
        else:
            assert leaf.sharding.spec == PartitionSpec()
    assert specs == expected
