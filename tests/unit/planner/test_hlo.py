"""Reading the compiler's text: sizes counted by hand, both ways of writing tuple elements, kernels over many lines."""

from __future__ import annotations

import pytest

from forerun.planner.hlo import HBM, HOST, VMEM, parse, shapes_in

SMALL = r"""HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,128]{1,0:T(8,128)})->f32[]}

FileNames
1 "step.py"

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%fused (param_0: bf16[4,16,256,128]) -> (f32[4,256,128], bf16[4,16,256,128]) {
  %param_0 = bf16[4,16,256,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %zero = f32[]{:T(128)} constant(0)
  %wide = f32[4,16,256,128]{3,2,1,0:T(8,128)} convert(%param_0)
  %less = f32[4,256,128]{2,1,0:T(8,128)} reduce(%wide, %zero), dimensions={1}, to_apply=%add.1
  ROOT %pair = (f32[4,256,128]{2,1,0:T(8,128)}, bf16[4,16,256,128]{3,2,1,0:T(8,128)(2,1)}) tuple(%less, %param_0)
}

ENTRY %main (q: bf16[4,16,256,128], k: bf16[4,8,256,128]) -> bf16[4,16,256,128] {
  %q = bf16[4,16,256,128]{3,2,1,0:T(8,128)(2,1)} parameter(0), sharding={replicated}
  %k = bf16[4,8,256,128]{3,2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %splash_mha_fwd.2 = (f32[4,256,128]{2,1,0:T(8,128)}, bf16[4,16,256,128]{3,2,1,0:T(8,128)(2,1)}) custom-call(%q, %k, /*index=2*/%k), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\"block_q\": 128, \"block_kv\": 256}"
Every line of it may begin as it likes
}}, metadata={op_name="jit(step)/while/(body)/attention" stack_frame_id=3}, backend_config={"custom_call_config":{"body":"TUzv(("}}
  %out = bf16[4,16,256,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%splash_mha_fwd.2), index=1, frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}
  %both = (f32[4,256,128]{2,1,0:T(8,128)}, bf16[4,16,256,128]{3,2,1,0:T(8,128)(2,1)}) fusion(%out), kind=kLoop, calls=%fused
  ROOT %last = bf16[4,16,256,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%both), index=1
}
"""  # noqa: E501


def bytes_of(text: str) -> float:
    [shape] = shapes_in(text)
    return shape.size_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32[]{:T(128)}", 4),
        ("bf16[100,3]{1,0:T(8,128)(2,1)}", 104 * 128 * 2),
        ("bf16[100,3]{0,1:T(8,128)(2,1)}", 128 * 8 * 2),
        ("bf16[4096]{0:T(1024)(128)(2,1)}", 4096 * 2),
        ("bf16[100]{0:T(1024)(128)(2,1)}", 1024 * 2),
        ("f32[3,8192]{1,0:T(4,128)}", 4 * 8192 * 4),
        ("bf16[3,8192,32,100]{3,1,2,0:T(8,128)(2,1)}", 3 * 32 * 8192 * 128 * 2),
        ("s8[1,4,4]{2,1,0:T(4,128)(4,1)S(1)}", 4 * 128),
        ("s4[8,128]{1,0:T(8,128)}", 8 * 128 / 2),
        ("f8e4m3fn[8,128]{1,0}", 8 * 128),
        ("f32[5,7]{1,0}", 5 * 7 * 4),
        ("f32[<=16,128]{1,0:T(8,128)}", 16 * 128 * 4),
    ],
)
def test_bytes_with_tiles_filled_up(text: str, expected: float) -> None:
    assert bytes_of(text) == expected


def test_memory_spaces() -> None:
    shapes = shapes_in(
        "(bf16[8,128]{1,0:T(8,128)(2,1)S(5)}, (f32[8,128]{1,0:T(8,128)S(1)}, /*index=2*/f32[8,128]{1,0:T(8,128)}),"
        " u32[]{:S(2)}, token[])"
    )
    assert [shape.space for shape in shapes] == [HOST, VMEM, HBM, 2]
    assert [shape.dims for shape in shapes] == [(8, 128)] * 3 + [()]


def test_computations_and_their_instructions() -> None:
    module = parse(SMALL)
    assert module.entry == "main"
    assert {name: [x.name for x in c.instructions] for name, c in module.computations.items()} == {
        "add.1": ["x", "y", "sum"],
        "fused": ["param_0", "zero", "wide", "less", "pair"],
        "main": ["q", "k", "splash_mha_fwd.2", "out", "both", "last"],
    }
    assert [module.computations[name].root.name for name in ("add.1", "fused", "main")] == ["sum", "pair", "last"]


def test_a_kernel_over_many_lines_is_one_instruction() -> None:
    main = parse(SMALL).computations["main"]
    kernel, out = main.by_name["splash_mha_fwd.2"], main.by_name["out"]
    assert (kernel.op, kernel.operands) == ("custom-call", ("q", "k", "k"))
    assert r"\"block_q\": 128" in kernel.attributes
    assert kernel.op_name() == "jit(step)/while/(body)/attention"
    assert kernel.size_bytes == 4 * 256 * 128 * 4 + 4 * 16 * 256 * 128 * 2
    assert (out.op, out.index, out.operands) == ("get-tuple-element", 1, ("splash_mha_fwd.2",))


def test_what_stands_after_the_operands() -> None:
    module = parse(SMALL)
    both = module.computations["main"].by_name["both"]
    assert (both.attribute("calls"), both.attribute("body")) == ("fused", None)
    assert module.computations["fused"].by_name["less"].attribute("to_apply") == "add.1"
    assert {n: x.name for n, x in module.computations["add.1"].parameters().items()} == {0: "x", 1: "y"}
    assert module.computations["fused"].by_name["zero"].literal == "0"
    users = module.users["fused", "param_0"]
    assert [(user.name, number) for user, number in users] == [("wide", 0), ("pair", 1)]


def test_elements_named_by_a_hash() -> None:
    """Compilers since 2026 write `%pair#1` in the place of a get-tuple-element."""
    module = parse(
        """HloModule m

ENTRY %main (p: (f32[8,128], (s32[], /*index=1*/bf16[16,128]))) -> f32[8,128] {
  %p = (f32[8,128]{1,0:T(8,128)}, (s32[]{:T(128)}, /*index=1*/bf16[16,128]{1,0:T(8,128)(2,1)S(1)})) parameter(0)
  %a = f32[8,128]{1,0:T(8,128)} negate(%p#0)
  %b = bf16[16,128]{1,0:T(8,128)(2,1)S(1)} negate(%p#1#1)
  ROOT %c = f32[8,128]{1,0:T(8,128)} add(%a, %p#0)
}
"""
    )
    main = module.computations["main"]
    assert [(x.name, x.op, x.index) for x in main.instructions if x.op == "get-tuple-element"] == [
        ("p#0", "get-tuple-element", 0),
        ("p#1", "get-tuple-element", 1),
        ("p#1#1", "get-tuple-element", 1),
    ]
    assert main.by_name["p#0"].size_bytes == 8 * 128 * 4
    assert (main.by_name["p#1#1"].size_bytes, main.by_name["p#1#1"].shapes[0].space) == (16 * 128 * 2, VMEM)
    assert [user.name for user, _ in module.users["main", "p#0"]] == ["a", "c"]
    assert main.root.operands == ("a", "p#0")


def test_threads_after_a_computation() -> None:
    module = parse(
        '%side (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8]{0} parameter(0)\n}, execution_thread="sparsecore"\n\n'
        "ENTRY %main (q: f32[8]) -> f32[8] {\n  ROOT %q = f32[8]{0} parameter(0)\n}\n"
    )
    assert [len(c.instructions) for c in module.computations.values()] == [1, 1]
