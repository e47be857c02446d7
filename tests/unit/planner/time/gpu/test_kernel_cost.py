from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import parse
from forerun.planner.time.gpu.gpu_model import GpuModel, assumed_gpu, gpu_model_of
from forerun.planner.time.gpu.kernel_cost import (
    START_K,
    AttentionShape,
    attention_seconds,
    attention_shape,
    gemm_seconds,
)
from forerun.planner.time.instruction_cost import InstructionWork
from forerun.planner.time.matrix_work import MatrixProduct, dot_product

# Fused attention: FLOPs by counting pairs, and rates of published measurements.

SHAPE = AttentionShape(batch=2, heads=16, queries=512, keys=512, head=128, causal=True)


def counted_pairs(shape: AttentionShape) -> int:
    window = shape.window or shape.keys
    if not shape.causal:
        return shape.queries * window
    return sum(min(position + 1, window) for position in range(shape.queries))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 100])
def test_pairs(causal: bool, window: int) -> None:
    shape = replace(SHAPE, causal=causal, window=window)
    assert shape.pairs == pytest.approx(counted_pairs(shape), rel=0.01)  # the diagonal counts half
    assert shape.flops == pytest.approx(4 * 2 * 16 * 128 * shape.pairs)
    assert replace(shape, backward=True).flops == pytest.approx(2.5 * shape.flops)


@pytest.mark.parametrize(
    ("length", "head", "causal", "published"),
    [
        # cuDNN forward on H100, TFLOP/s, 16k tokens: FlashAttention-3, arXiv 2407.08608, figure 5.
        (512, 128, False, 497),
        (2048, 128, False, 617),
        (16384, 128, False, 595),
        (512, 64, False, 335),
        (16384, 64, False, 413),
        (1024, 256, True, 391),
        (4096, 256, True, 483),
        (16384, 256, True, 509),
    ],
)
def test_rates_are_near_published_ones(length: int, head: int, causal: bool, published: float) -> None:
    shape = AttentionShape(16384 // length, 2048 // head, length, length, head, causal)
    rate = shape.flops / attention_seconds(assumed_gpu(chip_named("h100"), 8), shape) / 1e12
    assert rate == pytest.approx(published, rel=0.12)


def call(target: str, mask: str, window: int, space: str = "") -> AttentionShape | None:
    scores = {"dimensions": ["2", "16", "1024", "1024"], "layout": {"minor_to_major": ["3", "2", "1", "0"]}}
    fields = {"intermediate_tensor_shape": scores, "mask_type": mask, "sliding_window_length": window}
    config = json.dumps({"cudnn_fmha_backend_config": fields}, separators=("," + space, ":" + space))
    text = f"""HloModule m

ENTRY %main (q: bf16[2,1024,16,64], k: bf16[2,1024,4,64]) -> bf16[2,16,1024,64] {{
  %q = bf16[2,1024,16,64]{{3,2,1,0}} parameter(0)
  %k = bf16[2,1024,4,64]{{3,2,1,0}} parameter(1)
  ROOT %x = (bf16[2,16,1024,64]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), custom_call_target="{target}", \
backend_config={config}
}}
"""
    entry = parse(text).computations["main"]
    return attention_shape(entry, entry.by_name["x"])


def test_calls() -> None:
    expected = AttentionShape(2, 16, 1024, 1024, 64, causal=True)
    assert call("__cudnn$fmhaSoftmax", "CAUSAL", 0) == expected
    assert call("__cudnn$fmhaSoftmax", "CAUSAL", 0, space=" ") == expected  # as JAX writes it
    packed = call("__cudnn$fmhaSoftmaxBackward", "PADDING_CAUSAL", 256)
    assert packed == replace(expected, window=256, backward=True)
    assert call("__cudnn$fmhaScaleBiasSoftmax", "NO_MASK", 0) == replace(expected, causal=False)
    assert call("__triton", "CAUSAL", 0) is None


# Gemms against times that were worked out by hand on a GPU of round figures.

# One tile of 128 x 256 with one element of K takes one second on each of its 100 cores.
TILE_FLOPS = 2.0 * 128 * 256
MODEL = GpuModel(
    gemm_flops=100 * TILE_FLOPS,
    fp8_flops=200 * TILE_FLOPS,
    fp32_flops=50 * TILE_FLOPS,
    attention_flops=1.0,
    attention_backward_flops=1.0,
    hbm_bytes_per_second=1.0,
    l2_bytes=0.0,
    l2_bytes_per_second=1e30,
    cores=100,
    tile=(128, 256),
    link_bytes_per_second=1.0,
    nvls_bytes_per_second=0.0,
    network_bytes_per_second=1.0,
    host_bytes_per_second=1.0,
)
K = 1000


def gemm(m: int, n: int, k: int = K, operand: str = "bf16", batch: int = 1) -> MatrixProduct:
    return MatrixProduct(batch, m, n, k, operand)


def test_full_waves() -> None:
    """100 tiles on 100 cores: one wave, which takes K plus the start of the pipeline."""
    assert gemm_seconds(MODEL, gemm(128 * 10, 256 * 10)) == pytest.approx(K + START_K)
    assert gemm_seconds(MODEL, gemm(128 * 20, 256 * 10)) == pytest.approx(2 * (K + START_K))
    assert gemm_seconds(MODEL, gemm(128, 256, batch=100)) == pytest.approx(K + START_K)


def test_types_have_their_own_rates() -> None:
    full = gemm_seconds(MODEL, gemm(1280, 2560))
    assert gemm_seconds(MODEL, gemm(1280, 2560, operand="f8e4m3fn")) == pytest.approx(full / 2)
    assert gemm_seconds(MODEL, gemm(1280, 2560, operand="f32")) == pytest.approx(full * 2)


def test_a_wave_that_is_not_full_costs_as_much_as_a_full_one() -> None:
    """101 tiles: between one and two waves, because smaller tiles or a split of K fill the second wave better."""
    one, two = (gemm_seconds(MODEL, gemm(128 * rows, 256 * 10)) for rows in (10, 20))
    between = gemm_seconds(MODEL, gemm(128 * 10 + 1, 256 * 10))
    assert one < between <= two


def test_the_fastest_tile_counts() -> None:
    """101 tiles of 128 x 256 on 100 cores, with a K too short to be split.

    Two waves of the largest tile take 2 units. Tiles of half the size take 3 waves: 3 / 2 / 0.93 = 1.61. Those of a
    quarter take 5 waves: 5 / 4 / 0.82 = 1.52. Those of an eighth take 9 waves: 9 / 8 / 0.65 = 1.73.
    """
    assert gemm_seconds(MODEL, gemm(128, 256, k=200, batch=101)) == pytest.approx(5 / 4 / 0.82 * (200 + START_K))


def test_more_work_never_takes_less_time() -> None:
    for sizes in (
        [(m, 2048, 1024) for m in range(64, 8192, 192)],
        [(2048, n, 1024) for n in range(64, 8192, 192)],
        [(2048, 2048, k) for k in range(64, 8192, 192)],
    ):
        times = [gemm_seconds(gpu_model_of(chip_named("h100"), 8), gemm(*size)) for size in sizes]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("chip", "size", "low", "high"),
    [
        # TFLOP/s of microbenchmarks: SemiAnalysis, 2024-12 (720), and the MAMF tables of stas00/ml-engineering.
        ("h100", (16384, 8192, 8192), 680, 795),
        ("a100-80", (6912, 16384, 2048), 225, 268),
        ("b200", (8192, 8192, 8192), 1400, 1750),  # arXiv 2604.23466: 1672
        ("4090", (8192, 8192, 8192), 135, 165),
    ],
)
def test_large_gemms_are_near_microbenchmarks(chip: str, size: tuple[int, int, int], low: float, high: float) -> None:
    shape = gemm(*size)
    rate = shape.flops / gemm_seconds(assumed_gpu(chip_named(chip), 8), shape) / 1e12
    assert low <= rate <= high


CALL = """HloModule m

ENTRY %main (a: bf16[8,64,32], b: bf16[8,32,16]) -> f32[8,64,16] {
  %a = bf16[8,64,32]{2,1,0} parameter(0)
  %b = bf16[8,32,16]{2,1,0} parameter(1)
  %c = (f32[8,64,16]{2,1,0}, s8[33554432]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
  ROOT %d = f32[8,64,16]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, \
rhs_contracting_dims={1}
}
"""


def test_dimensions_of_a_call_and_of_a_dot() -> None:
    module = parse(CALL)
    entry = module.computations["main"]
    call, dot = (dot_product(entry, entry.by_name[name]) for name in "cd")
    assert call == dot == MatrixProduct(8, 64, 16, 32, "bf16")
    assert call is not None
    assert call.flops == 2 * 8 * 64 * 16 * 32
    assert InstructionWork(module).flops(entry, entry.by_name["c"]) == call.flops
