"""Fused attention: FLOPs by counting pairs, and rates of published measurements."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import parse
from forerun.planner.time.gpu.attention_cost import AttentionShape, attention_seconds, attention_shape
from forerun.planner.time.gpu.gpu_model import assumed_gpu

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
