"""Workspaces of cuBLAS and cuDNN in hand-made GPU programs: their class, and the estimate of those that are missing."""

from __future__ import annotations

import pytest

from forerun.planner.hlo import parse
from forerun.planner.memory.breakdown import (
    GATHERED,
    GRADIENTS,
    KERNELS,
    LOSS,
    WORKING,
    WORKSPACE,
    ModelShapes,
    hidden_bytes,
    ledger,
)
from forerun.planner.memory.library_workspace import backward_workspace_bytes

ATTENTION = 'metadata={op_name="jit(step)/jvp()/while/body/attention/dot"}'
PROGRAM = f"""HloModule jit_step
ENTRY %main (p: f32[8,128]) -> f32[] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  %gemm = (f32[4,64]{{1,0}}, s8[4096]{{0}}) custom-call(%p), custom_call_target="__cublas$lt$matmul", {ATTENTION}
  %forward = (bf16[2,4,8,16]{{3,2,1,0}}, f32[2,4,8]{{2,1,0}}, u8[0]{{0}}) custom-call(%p), \
custom_call_target="__cudnn$fmhaSoftmax", {ATTENTION}
  %backward = (bf16[2,4,8,16]{{3,2,1,0}}, bf16[2,2,8,16]{{3,2,1,0}}, bf16[2,2,8,16]{{3,2,1,0}}, u8[0]{{0}}) \
custom-call(%p), custom_call_target="__cudnn$fmhaSoftmaxBackward", {ATTENTION}
  %logits = f32[4,50]{{1,0}} fusion(%p), calls=%f, metadata={{op_name="jit(step)/jvp(loss)/while/body/dot"}}
  %zeros = f32[50,32]{{1,0}} fusion(%p), calls=%f, metadata={{op_name="jit(step)/jvp()/shard_map/loss/broadcast"}}
  %table = bf16[50,32]{{1,0}} fusion(%p), calls=%f, metadata={{op_name="jit(step)/jvp()/shard_map/loss/while"}}
  %turned = f32[16,3,24]{{2,1,0}} fusion(%p), calls=%f, metadata={{op_name="jit(step)/jvp()/while"}}
  ROOT %end = f32[] copy(%p)
}}
"""
# The sum of query gradients and of the softmax in float32, and bfloat16 gradients of keys and values for 4 heads each.
HIDDEN = 4 * (2 * 4 * 8 * 16) + 4 * (2 * 4 * 8) + 2 * 2 * (2 * 4 * 8 * 16)
SHAPES = ModelShapes.of(3, [(3, 16, 24), (50, 8)])  # the embedding has 32 columns on four devices


def one(name: str, size: int, begins: int = 1) -> dict[str, int]:
    """Return the ledger of a heap with one value."""
    assignment = (
        f"allocation 0: size {size}, preallocated-temp:\n value: <1 {name} @0> (size={size},offset=0): f32[1]\n"
    )
    index = name.partition("{")[2]
    live = f"    {name.partition('{')[0]}{{{index or '}'}:{begins}-{begins + 2}\n"
    program = PROGRAM.replace("fmhaSoftmaxBackward", "none")
    found = ledger(assignment.replace("f32[1]", "(x)"), live, parse(program), {}, size, SHAPES)
    return {kind: int(bytes_) for kind, bytes_ in found.items()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemm{0}", WORKING),
        ("gemm{1}", WORKSPACE),
        ("forward{0}", KERNELS),
        ("logits", LOSS),
        ("zeros", GRADIENTS),
        ("table", GATHERED),
        ("turned", GATHERED),
    ],
)
def test_classes_of_gpu_programs(name: str, kind: str) -> None:
    assert one(name, 4096) == {kind: 4096}


def test_workspace_of_the_backward_kernel() -> None:
    assert backward_workspace_bytes((2, 4, 8, 16), (2, 2, 8, 16)) == HIDDEN
    assert backward_workspace_bytes((2, 4, 8, 16), (2, 4, 8, 16)) == 4 * 1024 + 4 * 64


def test_a_workspace_that_the_program_lacks_counts_while_its_kernel_runs() -> None:
    assignment = """allocation 3: size 10000, preallocated-temp:
 value: <1 logits @0> (size=10000,offset=0): f32[4,50]{1,0}
 value: <2 turned @0> (size=7000,offset=0): f32[16,3,24]{2,1,0}
"""
    live = "    logits{}:1-5\n    turned{}:8-20\n    backward{}:9-12\n    backward{0}:9-30\n"
    module = parse(PROGRAM)
    assert hidden_bytes(module, assignment, live) == 7000 + HIDDEN - 10000
    peak = 7000 + HIDDEN
    found = ledger(assignment, live, module, {}, peak, SHAPES)
    assert found[WORKSPACE] == HIDDEN
    assert sum(found.values()) == peak
    # If the fullest moment is another one, the workspace does not change the total.
    small = assignment.replace("size=7000", "size=70")
    assert hidden_bytes(module, small, live) == 0
    assert WORKSPACE not in ledger(small, live, module, {}, 10000, SHAPES)


def test_a_known_workspace_is_not_estimated() -> None:
    known = PROGRAM.replace("bf16[2,2,8,16]{3,2,1,0}, u8[0]", "bf16[2,2,8,16]{3,2,1,0}, u8[512]")
    assert hidden_bytes(parse(known), "allocation 3: size 1, preallocated-temp:\n", "    backward{}:9-12\n") == 0
