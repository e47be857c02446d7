"""Splash kernels as both compilers write them: what is read from one, and its FLOPs counted block by block."""

from __future__ import annotations

import pytest

from forerun.planner.hlo import parse
from forerun.planner.time.splash_cost import KernelShape, kernel_shape

Q = "bf16[4,16,1024,128]{3,2,1,0:T(8,128)(2,1)}"
KV = "bf16[4,8,1024,128]{3,2,1,0:T(8,128)(2,1)}"
DQ_FUSED = "bf16[4,2,16,1024,128]{4,3,2,1,0:T(8,128)(2,1)}"
RESIDUAL = "f32[4,16,1024,128]{3,2,1,0:T(8,128)}"
METADATA = {
    "fwd": r"\"block_q\": 512, \"block_kv\": 256, \"block_q_dkv\": 256, \"block_q_dq\": null",
    "dkv": r"\"block_q_dkv\": 512, \"block_kv_dkv\": 512, \"block_kv_dkv_compute\": 256",
    "dq": r"\"block_q_dq\": 512, \"block_kv_dq\": 512",
}


def scratch(block: int) -> str:
    return f"f32[4,{block},128]{{2,1,0:T(8,128)}}"


def shape_of(name: str, outputs: list[str], metadata: str = "", q: str = Q, kv: str = KV) -> KernelShape | None:
    text = f"""HloModule m

ENTRY %main () -> () {{
  %mask = s8[1,2,2]{{2,1,0:T(4,128)(4,1)}} parameter(0)
  %q = {q} parameter(1)
  %k = {kv} parameter(2)
  %v = {kv} parameter(3)
  %segments = s32[4,1024,128]{{2,1,0:T(8,128)}} parameter(4)
  %{name} = ({", ".join(outputs)}) custom-call(%mask, %mask, %q, %k, %v, /*index=5*/%segments), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{{metadata}}}"
}}}}, metadata={{op_name="jit(step)/attention/pallas_call"}}
}}
"""  # noqa: E501
    main = parse(text).computations["main"]
    return kernel_shape(main, main.by_name[name])


FWD = "splash_mha_fwd_segmented_residuals.2", "fwd"
DKV = "splash_mha_dkv_segmented_no_residuals.1", "dkv"
DQ = "splash_mha_dq_segmented_no_residuals.1", "dq"


@pytest.mark.parametrize("with_scratch", [True, False], ids=["scratch among the outputs", "no scratch"])
@pytest.mark.parametrize(
    ("kernel", "outputs", "kind"),
    [(FWD, [Q, RESIDUAL], "forward"), (DKV, [KV, KV], "dkv"), (DKV, [DQ_FUSED, KV, KV], "backward"), (DQ, [Q], "dq")],
)
def test_kind_sizes_and_block(kernel: tuple[str, str], outputs: list[str], kind: str, with_scratch: bool) -> None:
    name, metadata = kernel
    arrays = [scratch(512), scratch(512), *outputs] if with_scratch else outputs
    shape = shape_of(name, arrays, METADATA[metadata])
    assert shape is not None
    assert (shape.kind, shape.programs, shape.sequence, shape.keys, shape.head) == (kind, 4 * 16, 1024, 1024, 128)
    assert shape.block == 512


def test_scratch_as_long_as_the_sequence_makes_no_fused_backward() -> None:
    shape = shape_of(DKV[0], [scratch(1024), scratch(1024), KV, KV], METADATA["dkv"].replace("512", "1024"))
    assert shape is not None
    assert shape.kind == "dkv"


def test_other_kernels() -> None:
    assert shape_of("my_kernel.3", [Q]) is None


@pytest.mark.parametrize(("sequence", "block"), [(1024, 512), (2048, 512), (4096, 1024), (1024, 1024)])
def test_flops_by_visiting_blocks(sequence: int, block: int) -> None:
    """Causal: a block of queries meets the blocks of keys up to its own."""
    blocks = sequence // block
    visited = sum(1 for row in range(blocks) for column in range(blocks) if column <= row)
    for kind, matmuls in (("forward", 2), ("dq", 3), ("dkv", 4), ("backward", 5)):
        shape = KernelShape(kind, 2, 3, sequence, sequence, 128, block)
        assert shape.flops == pytest.approx(matmuls * 6 * visited * 2 * block * block * 128)
