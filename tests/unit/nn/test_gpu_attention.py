"""cuDNN's attention. The kernel needs a GPU, so NumPy computes what its documentation says, token by token.

The stand-in reads its operands only by the documented layout: offsets in elements, lengths in tokens, results [B, H, S,
D] that are [B, S, H, D] in memory. Values that cuDNN does not write are NaN here, so using one fails a test.
"""

from __future__ import annotations

import itertools
import json
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from tests.unit.nn.test_attention import Arrays, assert_same, drawn, plain

from forerun.config.schema import Remat
from forerun.nn import gpu_attention, sharding
from forerun.nn.attention import Kernel, attention
from forerun.nn.compute import Compute

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


class CudnnByNumPy:
    """A stand-in for `jax.ffi.ffi_call`. It counts the runs of each kernel."""

    def __init__(self) -> None:
        self.runs = {FORWARD: 0, BACKWARD: 0}

    def ffi_call(self, target: str, results: Any, *, output_layouts: Any, legacy_backend_config: str, **_: Any) -> Any:
        config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
        assert config["mask_type"] == "PADDING_CAUSAL"
        assert [tuple(layout) for layout in output_layouts if len(layout) == 4] == [(0, 2, 1, 3)] * (
            1 if target == FORWARD else 3
        )

        def run(*operands: np.ndarray) -> list[np.ndarray]:
            self.runs[target] += 1
            found = (_forward if target == FORWARD else _backward)(config, *(np.asarray(x) for x in operands))
            shapes = [tuple(one.shape) for one in results]
            made = [*found[: len(results) - 1], np.zeros(shapes[-1], np.uint8)]
            assert [x.shape for x in made] == shapes
            return [x.astype(one.dtype) for x, one in zip(made, results, strict=True)]

        return lambda *operands: jax.pure_callback(run, results, *operands, vmap_method=None)


def _scores(config: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scaled scores [H, t, t] of one sequence; hidden ones are -inf."""
    scores = np.einsum("thd,shd->hts", q, np.repeat(k, q.shape[1] // k.shape[1], 1)) * config["fmha_scale"]
    behind = np.arange(len(q))[:, None] - np.arange(len(q))
    window = config["sliding_window_length"] or len(q)
    return np.where((behind >= 0) & (behind < window), scores, -np.inf)


def _sequences(config: Any, q: np.ndarray, k: np.ndarray, lengths: Any, kv_lengths: Any, offsets: Any, kv_offsets: Any):
    """Yield the tokens of each sequence, from the offsets in elements."""
    rows, positions, heads, width = q.shape
    count = rows * config["max_seg_per_batch"]
    assert lengths.shape == kv_lengths.shape == (count,)
    assert offsets.shape == kv_offsets.shape == (count + 1,)
    assert np.all(np.diff(offsets) >= 0)
    for i in range(count):
        begin, rest = divmod(int(offsets[i]), heads * width)
        kv_begin, kv_rest = divmod(int(kv_offsets[i]), k.shape[2] * width)
        assert rest == kv_rest == 0
        assert (begin, lengths[i]) == (kv_begin, kv_lengths[i])
        assert lengths[i] <= positions
        yield slice(begin, begin + int(lengths[i]))


def _flat(*arrays: np.ndarray) -> list[np.ndarray]:
    return [x.astype(np.float64).reshape(-1, *x.shape[2:]) for x in arrays]


def _heads_first(flat: np.ndarray, like: np.ndarray) -> np.ndarray:
    return flat.reshape(like.shape).swapaxes(1, 2)


def _forward(config: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, *packing: np.ndarray) -> list[np.ndarray]:
    flat_q, flat_k, flat_v = _flat(q, k, v)
    out = np.full(flat_q.shape, np.nan)
    statistics = np.full((len(packing[0]), q.shape[2], q.shape[1]), np.nan)
    for i, one in enumerate(_sequences(config, q, k, *packing)):
        scores = _scores(config, flat_q[one], flat_k[one])
        statistics[i, :, : scores.shape[1]] = np.logaddexp.reduce(scores, axis=-1)
        shares = np.exp(scores - statistics[i, :, : scores.shape[1], None])
        out[one] = np.einsum("hts,shd->thd", shares, np.repeat(flat_v[one], q.shape[2] // k.shape[2], 1))
    return [_heads_first(out, q), statistics]


def _backward(
    config: Any,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    statistics: np.ndarray,
    dout: np.ndarray,
    out: np.ndarray,
    *packing: np.ndarray,
) -> list[np.ndarray]:
    flat_q, flat_k, flat_v, flat_dout, flat_out = _flat(q, k, v, dout, out)
    dq, dk, dv = (np.full(x.shape, np.nan) for x in (flat_q, flat_k, flat_v))
    groups = q.shape[2] // k.shape[2]
    for i, one in enumerate(_sequences(config, q, k, *packing)):
        scores = _scores(config, flat_q[one], flat_k[one])
        shares = np.exp(scores - statistics[i, :, : scores.shape[1], None].astype(np.float64))
        dshares = np.einsum("thd,shd->hts", flat_dout[one], np.repeat(flat_v[one], groups, 1))
        sums = np.einsum("thd,thd->ht", flat_dout[one], flat_out[one])
        dscores = shares * (dshares - sums[..., None]) * config["fmha_scale"]
        dq[one] = np.einsum("hts,shd->thd", dscores, np.repeat(flat_k[one], groups, 1))
        for target, full in (
            (dk, np.einsum("hts,thd->shd", dscores, flat_q[one])),
            (dv, np.einsum("hts,thd->shd", shares, flat_dout[one])),
        ):
            target[one] = full.reshape(len(full), k.shape[2], groups, k.shape[3]).sum(2)
    return [_heads_first(dq, q), _heads_first(dk, k), _heads_first(dv, v)]


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> CudnnByNumPy:
    made = CudnnByNumPy()
    monkeypatch.setattr(gpu_attention.jax.ffi, "ffi_call", made.ffi_call)
    return made


def gradients(arrays: Arrays, window: int | None, kernel: Kernel) -> tuple[jax.Array, ...]:
    """(out, dq, dk, dv) of bfloat16 inputs, under a fixed random cotangent."""
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays[:3])
    pull = jnp.asarray(np.random.default_rng(9).normal(size=q.shape), jnp.float32)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attention(q, k, v, arrays[3], window=window, kernel=kernel)
        return jnp.sum(out.astype(jnp.float32) * pull), out

    (_, out), slopes = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return tuple(x.astype(jnp.float32) for x in (out, *slopes))


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_packed_documents_are_those_of_the_softmax(cudnn: CudnnByNumPy, window: int | None, kv_heads: int) -> None:
    arrays = drawn(24, heads=4, kv_heads=kv_heads, width=8)
    got = gradients(arrays, window, Kernel("cudnn"))
    assert_same(got, gradients(arrays, window, Kernel("xla")), 0.02)
    assert cudnn.runs == {FORWARD: 1, BACKWARD: 1}
    rounded = tuple(x.astype(jnp.bfloat16) for x in arrays[:3])
    np.testing.assert_allclose(got[0], plain(*rounded, arrays[3], window), rtol=0, atol=0.02)


def test_more_documents_than_one_kernel_call_takes(cudnn: CudnnByNumPy) -> None:
    q, k, v, _ = drawn(24, heads=2, kv_heads=1, width=8)
    many = jnp.asarray(np.stack([np.arange(24) // 2, np.arange(24)]), jnp.int32)  # 12 + 24 documents
    arrays = q, k, v, many
    assert gpu_attention.sequences_per_row(2, 24) == 8
    assert_same(gradients(arrays, None, Kernel("cudnn")), gradients(arrays, None, Kernel("xla")), 0.02)
    assert cudnn.runs == {FORWARD: 3, BACKWARD: 3}, "36 documents in groups of 16"


def test_each_device_runs_the_kernel_on_its_rows_and_heads(cudnn: CudnnByNumPy) -> None:
    arrays = drawn(16, heads=4, kv_heads=2, width=8, rows=2)
    expected = gradients(arrays, None, Kernel("xla"))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        got = gradients(arrays, None, Kernel("cudnn"))
    assert_same(got, expected, 0.02)
    assert cudnn.runs == {FORWARD: 4, BACKWARD: 4}


@pytest.mark.parametrize(("keep", "forwards"), [(("attention_out",), 3), ((), 6)])
def test_kept_residuals_avoid_the_second_forward_kernel(
    cudnn: CudnnByNumPy, keep: tuple[str, ...], forwards: int
) -> None:
    q, k, v, segments = drawn(16, heads=2, kv_heads=1, width=8)
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    compute = Compute(remat=Remat(policy="named", keep=keep))

    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(attention(jnp.sin(x), k, v, segments, window=None, kernel=Kernel("cudnn"))), None

    def loss(x: jax.Array) -> jax.Array:
        return jax.lax.scan(compute.checkpointed(layer), x, length=3)[0].astype(jnp.float32).sum()

    jax.block_until_ready(jax.jit(jax.grad(loss))(q.astype(jnp.bfloat16)))
    assert cudnn.runs == {FORWARD: forwards, BACKWARD: 3}


@pytest.mark.parametrize(
    ("dtype", "width", "softcap", "kernel"),
    [
        (jnp.float32, 8, None, Kernel("cudnn")),
        (jnp.bfloat16, 136, None, Kernel("cudnn")),
        (jnp.bfloat16, 12, None, Kernel("cudnn")),
        (jnp.bfloat16, 8, 30.0, Kernel("cudnn")),
    ],
    ids=["float32", "large-head", "odd-head", "soft-cap"],
)
def test_a_layer_that_cudnn_does_not_support_uses_xla(
    cudnn: CudnnByNumPy, dtype: Any, width: int, softcap: float | None, kernel: Kernel
) -> None:
    q, k, v, segments = drawn(16, heads=2, kv_heads=1, width=width)
    arrays = *(x.astype(dtype) for x in (q, k, v)), segments
    run = partial(attention, *arrays, window=None, softcap=softcap)
    np.testing.assert_array_equal(run(kernel=kernel), run(kernel=Kernel("xla")))
    assert cudnn.runs[FORWARD] == 0


def test_a_large_head_is_supported_where_the_kernel_says_so(cudnn: CudnnByNumPy) -> None:
    arrays = drawn(8, heads=2, kv_heads=1, width=256)
    got = gradients(arrays, None, Kernel("cudnn", largest_head=256))
    assert_same(got, gradients(arrays, None, Kernel("xla")), 0.02)
    assert cudnn.runs == {FORWARD: 1, BACKWARD: 1}


def test_offsets_that_exceed_int32_split_the_rows(cudnn: CudnnByNumPy, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = drawn(16, heads=2, kv_heads=1, width=8, rows=5)
    monkeypatch.setattr(gpu_attention, "OFFSET_LIMIT", 2 * 16 * 2 * 8 + 1)
    assert_same(gradients(arrays, None, Kernel("cudnn")), gradients(arrays, None, Kernel("xla")), 0.02)
    assert cudnn.runs == {FORWARD: 3, BACKWARD: 3}, "rows 2, 1 + 2"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=3), st.integers(1, 6))
def test_the_sequences_are_the_runs_of_equal_segments(segments: list[list[int]], size: int) -> None:
    """The groups' offsets, expanded to a mask, are the mask of equal segments in an unbroken run."""
    found = gpu_attention.TokenSequences.of(jnp.asarray(segments, jnp.int32))
    owner = np.full(7 * len(segments), -1)
    count = 0
    for group in range(int(found.groups(size))):
        starts = np.asarray(found.starts(group, size))
        mine = np.zeros(owner.shape, bool)
        for begin, end in itertools.pairwise(starts):
            assert np.all(owner[begin:end] == -1)
            owner[begin:end] = count
            mine[begin:end] = True
            count += 1
        np.testing.assert_array_equal(mine, found.in_group(group, size))
    runs = [0]
    for token in range(1, owner.size):
        (row, at), (_, before) = divmod(token, 7), divmod(token - 1, 7)
        runs.append(runs[-1] + (at == 0 or segments[row][at] != segments[row][before]))
    np.testing.assert_array_equal(owner[:, None] == owner, np.equal.outer(runs, runs))


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [(1, 128, 8), (2, 4096, 8), (8, 4096, 4), (1, 32768, 4), (2, 32768, 2), (64, 8192, 2)],
)
def test_sequences_of_a_call_are_limited_by_memory(rows: int, length: int, expected: int) -> None:
    assert gpu_attention.sequences_per_row(rows, length) == expected


def _custom_calls(run: Any, *arguments: Any) -> dict[str, tuple[Any, str]]:
    """The configuration of each cuDNN call that `run` lowers to, and its layouts and types, without those of the
    workspace and of the packing."""
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    found = {}
    for line in text.splitlines():
        if match := re.search(r"custom_call @(__cudnn\$\w+)\(.*?\) \{(.*?backend_config = \"(.*?)\".*)", line):
            config = json.loads(match[3].replace("\\22", '"'))
            # jax has the lengths and offsets as [B, n]. XLA reads them as one row of numbers (gpu_fused_mha_test.cc).
            ignored = r"tensor<\d+xui8>|tensor<(\d+x)+i32>(, )?|dense<(0|\[1, 0\])> : tensor<\dxindex>(, )?|mhlo.*?, "
            found[match[1]] = config, re.sub(ignored, "", match[2].replace(match[3], ""))
    return found


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_calls_are_those_of_jax(window: int | None, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """jax's own wrapper makes the same calls, if it believes that there is a GPU. It wants offsets by row."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda _: False)
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, 256, kv_heads, 64), jnp.bfloat16)
    lengths, offsets = (jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (8, 9))
    segments = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def ours(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return attention(q, k, v, segments, window=window, kernel=Kernel("cudnn")).astype(jnp.float32).sum()

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, offsets: jax.Array) -> jax.Array:
        mask, scale = fused.MaskType.PADDING_CAUSAL, 64**-0.5
        packing = lengths, lengths, offsets, offsets
        out = fused.dot_product_attention(
            q, k, v, None, None, *packing, mask_type=mask, scale=scale, sliding_window_length=window
        )
        return out.astype(jnp.float32).sum()

    made, expected = (
        _custom_calls(jax.grad(run, argnums=(0, 1, 2)), q, kv, kv, *rest)
        for run, rest in ((ours, (segments,)), (theirs, (lengths, offsets)))
    )
    assert set(made) == {FORWARD, BACKWARD}
    assert made[FORWARD][0]["cudnn_fmha_backend_config"]["max_seg_per_batch"] == 8
    for name in made:
        assert made[name] == expected[name]
