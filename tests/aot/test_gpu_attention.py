"""Attention in programs that XLA's GPU compiler made for 32,768 positions: its kernels, and no buffer of S x S."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.nn import sharding
from forerun.nn.attention import attention
from forerun.planner.compile.installed_compilers import GPU, compile_only_topology
from forerun.program import kernels
from forerun.program.build import program_of
from forerun.program.compiler_options import compiler_options
from forerun.resolve.resolved_job import ResolvedJob

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not any(map(find_spec, GPU.packages)), reason="jax's CUDA plugin is not installed"),
]

S = 32_768
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


@pytest.fixture(autouse=True, scope="module")
def without_compile_cache() -> Iterator[None]:
    """jax stores programs for devices that do not exist, but it cannot load them again."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@cache
def _compiled(
    machine: str,
    tp: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    dtype: str = "bfloat16",
    head: int = 64,
) -> str:
    """The optimized program of attention and its gradients, with 4 query heads for 2 key/value heads."""
    devices = compile_only_topology(slice_named(machine)).devices[:tp]
    mesh = Mesh(np.array(devices).reshape(1, 1, tp), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    first = devices[0]
    capability = kernels.compute_capability(first)
    kernel = kernels.attention("auto", "gpu", first.device_kind, dtype, capability=capability).kernel

    def array(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(None, None, "tp") if len(shape) == 4 else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        out = attention(q, k, v, segments, window=window, softcap=softcap, kernel=kernel)
        return (out.astype(jnp.float32) ** 2).sum()

    q, kv, segments = array(1, S, 4, head), array(1, S, 2, head), array(1, S, dtype="int32")
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, kv, kv, segments)
        options = {**compiler_options("gpu", first.device_kind, MeshShape(1, 1, 1)).values, "xla_gpu_autotune_level": 0}
        return lowered.lower(lowering_platforms=("cuda",)).compile(compiler_options=options).as_text()


def _kernels(text: str) -> Counter[str]:
    return Counter(re.findall(r'custom_call_target="(__cudnn\$\w+)"', text))


def _largest_buffer(text: str) -> int:
    """The elements of the largest array in a program."""
    shapes = re.findall(r"\b(?:pred|[sufb]\w*\d)\[([\d,]+)\]", text)
    return max(math.prod(int(size) for size in shape.split(",")) for shape in shapes)


def _repeats(text: str) -> set[str]:
    """The shapes in which S occurs twice."""
    return {shape for shape in re.findall(r"\[([\d,]+)\]", text) if shape.split(",").count(str(S)) > 1}


@pytest.mark.parametrize("machine", ["h100-1", "b200-1"])
@pytest.mark.parametrize("window", [None, 4096])
def test_packed_rows_use_the_causal_kernel(machine: str, window: int | None) -> None:
    text = _compiled(machine, window=window)
    # One call for the first documents of the rows, and one in the loop for documents beyond them.
    assert _kernels(text) == {FORWARD: 2, BACKWARD: 2}
    assert Counter(re.findall(r'"mask_type":\s*"(\w+)"', text)) == {"PADDING_CAUSAL": 4}
    assert set(re.findall(r'"sliding_window_length":\s*"?(\d+)', text)) == {str(window or 0)}
    assert _largest_buffer(text) < S * S
    assert not _repeats(text)


def test_each_device_of_a_tensor_parallel_mesh_has_half_of_the_heads() -> None:
    text = _compiled("h100-8", tp=2)
    assert _kernels(text) == {FORWARD: 2, BACKWARD: 2}
    calls = [line for line in text.splitlines() if BACKWARD in line]
    assert len(calls) == 2
    for line in calls:
        # The gradients of 2 query heads and of 1 key/value head.
        assert re.findall(r"bf16\[1,(\d),32768,64\]", line.split("custom-call(")[0]) == ["2", "1", "1"]
    assert not re.search(r"= \S+ (all-gather|all-to-all|all-reduce)", text), "the kernel needs no data of other devices"
    assert not _repeats(text)


@pytest.mark.parametrize(
    ("machine", "softcap", "dtype", "head"),
    [
        ("a100-80-1", None, "bfloat16", 64),
        ("h100-1", 30.0, "bfloat16", 64),
        ("h100-1", None, "float32", 64),
        ("h100-1", None, "bfloat16", 264),
        ("b200-1", None, "bfloat16", 136),
    ],
    ids=["a100", "soft-cap", "float32", "h100-head-264", "b200-head-136"],
)
def test_other_programs_use_xla_in_blocks(machine: str, softcap: float | None, dtype: str, head: int) -> None:
    text = _compiled(machine, softcap=softcap, dtype=dtype, head=head)
    assert not _kernels(text)
    assert _largest_buffer(text) < S * S
    assert not _repeats(text)


@pytest.mark.parametrize(("keep", "forwards"), [(["attention_out"], 1), ([], 2)])
def test_kept_residuals_leave_one_forward_kernel_in_the_program(keep: list[str], forwards: int) -> None:
    """Each pass over the layers is a loop with one kernel, and a second one for documents beyond the first call."""
    job = Job.model_validate(
        {
            "model": {"layers": 2, "embed": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "vocab": 256},
            "data": "nothing",
            "sequence": 256,
            "batch": 1,
            "steps": 10,
            "remat": {"policy": "named", "keep": keep},
        }
    )
    devices = compile_only_topology(slice_named("h100-1")).devices
    program = program_of(ResolvedJob(job), MeshShape(1, 1, 1), devices)
    text = program.trace().lower(lowering_platforms=("cuda",)).as_text()
    lowered = Counter(re.findall(r"custom_call @(__cudnn\$\w+)", text))
    assert lowered == {FORWARD: 2 * forwards, BACKWARD: 2}


def test_the_search_for_buffers_finds_them() -> None:
    line = "%x = (bf16[2,1,32768,32768]{3,2,1,0}, u8[7]{0}) fusion(%y), kind=kLoop"
    assert _largest_buffer(line) == 2 * S * S
    assert _repeats(line) == {"2,1,32768,32768"}
