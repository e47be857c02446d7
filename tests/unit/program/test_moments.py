"""Optimizers with one state object per parameter, against torch, transformers, Optax and NumPy.

8-bit moments: the map of bitsandbytes, AdamW within the bound that its cells imply, and the state's size.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
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
from forerun.program import moments as rules
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


# Both maps by bitsandbytes 0.50.2 (`create_dynamic_map`), and blocks of 128 numbers with codes by torchao 0.18.0
# (`quantize_8bit_with_qmap`), which rounds to the nearest value, as the GPU kernels of bitsandbytes do. The float32 CPU
# kernel of bitsandbytes looks up one of 65,536 parts of -1 to 1, which is coarse for small numbers.
RECORD: Any = json.loads((Path(__file__).parent / "eight_bit_codes.json").read_text())


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values as bitsandbytes constructs them (`create_dynamic_map`)."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        middles = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values))


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_the_map_is_that_of_bitsandbytes(kind: str) -> None:
    decode = {"signed": rules.signed_values, "unsigned": rules.unsigned_values}[kind]
    values = np.asarray(decode(jnp.arange(256, dtype=jnp.uint8)))
    np.testing.assert_allclose(values, dynamic_map(kind == "signed"), rtol=1e-6)
    np.testing.assert_allclose(values, RECORD[kind]["map"], rtol=1e-6)


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_codes_are_the_nearest_values(kind: str) -> None:
    rng = np.random.default_rng(0)
    x = np.exp(rng.uniform(np.log(1e-9), 0, 20_000)) * (rng.choice([-1, 1], 20_000) if kind == "signed" else 1)
    x = np.concatenate([x, [0.0, 1.0, *([-1.0] if kind == "signed" else [])]]).astype(np.float32)
    encode = {"signed": rules.signed_codes, "unsigned": rules.unsigned_codes}[kind]
    codes, table = np.asarray(encode(jnp.asarray(x))), dynamic_map(kind == "signed")
    assert codes.min() >= 0
    assert codes.max() == 255
    apart = np.abs(table[codes] - x)
    np.testing.assert_array_less(apart, np.abs(table[None] - x[:, None]).min(axis=1) * (1 + 1e-5) + 1e-12)


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_blocks_are_coded_as_by_torchao(kind: str) -> None:
    rule = rules.CodedAdamRule(Any, 128)  # type: ignore[arg-type]
    x = jnp.asarray(RECORD[kind]["x"], jnp.float32)
    scale = rule._largest(x)
    codes = getattr(rules, f"{kind}_codes")(rule._share(x, scale)).reshape(x.shape)
    np.testing.assert_allclose(scale, RECORD[kind]["scale"], rtol=1e-6)
    assert np.mean(np.asarray(codes) != RECORD[kind]["codes"]) < 0.003, "only numbers on the edge of a cell differ"
    np.testing.assert_array_less(np.abs(np.asarray(codes, np.int32) - RECORD[kind]["codes"]), 2)


LAYOUT = {"w": ParamLayout((2, 64, 2, 64), "LEHD", 1, 1, True), "small": ParamLayout((2, 16), "LE", 1, 0, False)}


def run(name: str, gradients: Any, start: Any) -> tuple[list[np.ndarray], Any]:
    o = Optimizer(name=name, lr=1.0, schedule="constant", clip=None, weight_decay=0.0)
    tx = optimizer.chain(o, Schedule.of(o, 9, 0), {"w": True, "small": False}, LAYOUT)
    step = jax.jit(lambda params, moments, g: optimizer.update(tx, g, moments, params))
    params, moments, weights = start, tx.init(start), []
    for g in gradients:
        params, moments = step(params, moments, g)
        weights.append(jax.tree.map(np.asarray, params))
    return weights, moments


@pytest.fixture(scope="module")
def trials() -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    sizes = np.exp(rng.normal(size=LAYOUT["w"].shape))  # gradients of different sizes in a block
    gradients = [
        {
            "w": jnp.asarray(sizes * rng.normal(size=sizes.shape), jnp.float32),
            "small": jnp.asarray(rng.normal(size=(2, 16)), jnp.float32),
        }
        for _ in range(5)
    ]
    return gradients, jax.tree.map(lambda g: jnp.zeros_like(g), gradients[0])


def test_steps_are_adamw_within_the_error_of_the_codes(trials: Any) -> None:
    """The bound follows the intervals of both moments through AdamW's formulas, step by step."""
    gradients, start = trials
    coded, _ = run("adamw8bit", gradients, start)
    exact, _ = run("adamw", gradients, start)
    b1, b2, eps, apart = 0.9, 0.95, 1e-8, np.zeros(1)
    low, high, least, most, reach = (np.zeros(LAYOUT["w"].shape) for _ in range(5))  # of the mean, the root, the sum
    for t, (gradient, one, other) in enumerate(zip(gradients, coded, exact, strict=True), 1):
        g = np.asarray(gradient["w"], np.float64)
        low, high = b1 * low + (1 - b1) * g, b1 * high + (1 - b1) * g
        least, most = (np.sqrt(b2 * root**2 + (1 - b2) * g**2) for root in (least, most))
        divisors = [root / np.sqrt(1 - b2**t) + eps for root in (least, most)]
        corners = np.stack([mean / (1 - b1**t) / divisor for mean in (low, high) for divisor in divisors])
        reach = reach + corners.max(axis=0) - corners.min(axis=0)
        apart = np.abs(one["w"].astype(np.float64) - other["w"])
        np.testing.assert_array_less(apart, reach + 1e-4 * t)
        np.testing.assert_allclose(one["small"], other["small"], rtol=1e-4)  # 32 bits
        mean_error = 0.45 / 64 * block_largest(np.maximum(np.abs(low), np.abs(high)))
        error = root_error(least, most)
        low, high = low - mean_error, high + mean_error
        least, most = np.maximum(0, least - error), most + error
    assert apart.max() > 1e-2, "codes without an error would be no test"
    assert np.median(reach) < 1.0, "a bound as large as the updates would be no test"


def block_largest(sizes: np.ndarray) -> np.ndarray:
    """The largest of each block of 64, the complete last dimension."""
    return np.broadcast_to(sizes.max(axis=-1, keepdims=True), sizes.shape)


def root_error(least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Half a cell at most: 0.45 / 128 of the largest value. In lower decades it is relative to the value.

    Decade i has 2^(i + 1) values from 0.1 x 10^(i - 6), so half a cell is at most 4.5 / 2^(i + 1) of a value.
    """
    largest = block_largest(most)
    decade = np.clip(np.floor(np.log10(np.maximum(least / largest, 1e-7))) + 7, 0, 6)
    return np.minimum(0.45 / 128 * largest, 4.5 / 2 ** (decade + 1) * most + 3.3e-7 * largest)


def test_the_state_is_about_two_bytes_per_parameter(trials: Any) -> None:
    gradients, start = trials
    _, moments = run("adamw8bit", gradients[:1], start)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(moments)}
    size = sum(leaf.nbytes for path, leaf in leaves.items() if "'w'" in path)
    number = start["w"].size
    assert size == 2 * (number + 4 * number // 64)  # blocks of 64: the largest part of D that is no more than 128
    assert sum(leaf.nbytes for path, leaf in leaves.items() if "small" in path) == 2 * 4 * 32


@pytest.mark.parametrize(
    ("shape", "axes", "block"),
    [
        ((4, 64, 256), "LEF", 128),
        ((64, 96), "VE", 96),
        ((64, 8, 80), "EHD", 80),
        ((2, 256, 8), "LER", None),
        ((3, 63, 65), "LEF", None),
        ((100, 4096), "LE", 128),
        ((100, 4000), "LE", None),
    ],
)
def test_blocks_divide_the_last_dimension(shape: tuple[int, ...], axes: str, block: int | None) -> None:
    assert rules.block_of(ParamLayout(shape, axes, int(axes.startswith("L")), 1, True)) == block


def test_a_small_root_is_not_zero_and_a_zero_gradient_stays_zero() -> None:
    """bitsandbytes would code the square of 1e-5 next to 1 as zero, and divide by epsilon alone."""
    rule = rules.eight_bit_rule(optimizer.AdamRule(0.9, 0.95, 1e-8), LAYOUT["w"])
    g = jnp.full(LAYOUT["w"].shape, 1e-5, jnp.float32).at[..., 0].set(1.0).at[..., 1].set(0.0)
    moments, param = rule.init(g), jnp.zeros_like(g)
    for t in range(1, 4):
        with jax.numpy_dtype_promotion("standard"):
            direction, moments = rule.update(g, moments, param, jnp.int32(t))
        assert float(jnp.abs(direction).max()) < 1.6
        assert float(jnp.abs(direction[..., 1]).max()) == 0.0
        assert float(direction[..., 2:].min()) > 0.8


def test_a_root_below_the_map_is_not_coded_as_zero() -> None:
    """The square of a block's largest number decays slower than its mean, so a small mean can outlive its root."""
    adam = optimizer.AdamRule(0.9, 0.95, 1e-8)
    rule = rules.eight_bit_rule(adam, LAYOUT["w"])
    zero = jnp.zeros(LAYOUT["w"].shape, jnp.float32)
    steps = [zero.at[..., 0].set(1e3), *[zero] * 29, zero.at[..., 1].set(4e-5), zero]
    moments, exact, largest = rule.init(zero), adam.init(zero), 0.0
    for t, g in enumerate(steps, 1):
        with jax.numpy_dtype_promotion("standard"):
            direction, moments = rule.update(g, moments, zero, jnp.int32(t))
            expected, exact = adam.update(g, exact, zero, jnp.int32(t))
        largest = float(jnp.abs(direction[..., 1]).max())
    assert float(jnp.abs(expected[..., 1]).max()) > 0.1
    assert 0.0 < largest < 2.0 * float(jnp.abs(expected[..., 1]).max())
