"""The ledger against hand-made heaps: every byte is told once, and the sum is the compiler's total."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from forerun.planner.hlo import parse
from forerun.planner.memory import (
    ACTIVATIONS,
    GAPS,
    GATHERED,
    GRADIENTS,
    KERNELS,
    LOSS,
    PADDING,
    WORKING,
    WORKSPACE,
    ModelShapes,
    Unreadable,
    Value,
    alive_at_peak,
    argument_bytes,
    argument_padding,
    backward_workspace_bytes,
    hidden_bytes,
    ledger,
    memory_report,
    space_totals,
    temporaries,
)

ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.1 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 1: size 1000, preallocated-temp:
 value: <2 gathered @0> (size=300,offset=0): bf16[8,128]{1,0:T(8,128)(2,1)}
 value: <3 saved{1} @0> (size=400,offset=300): bf16[2,4,128]{2,1,0}
 value: <4 saved.again{1} (phi) @0> (size=400,offset=300): bf16[2,4,128]{2,1,0}
 value: <5 logits @0> (size=200,offset=750): f32[4,50]{1,0}
 value: <6 later @0> (size=100,offset=0): f32[25]{0}
allocation 2: size 64, color 1, preallocated-temp:
 value: <7 fast @0> (size=64,offset=0): f32[16]{0:S(1)}
"""
LIVE = """HloLiveRange (max 40):
  InstructionSequence:
    0:gathered
  BufferLiveRange:
    gathered{}:2-20
    saved{1}:1-30
    saved.again{1}:5-30
    logits{}:10-12
    later{}:25-30
"""
PROGRAM = """HloModule jit_step
ENTRY %main (p: f32[8,128]) -> f32[] {
  %param.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %gathered = bf16[8,128]{1,0} all-gather(%param.1), metadata={op_name="jit(step)/jvp()/convert"}
  %saved = (s32[], bf16[2,4,128]{2,1,0}) while(%gathered), condition=%c, body=%b
  %saved.again = (s32[], bf16[2,4,128]{2,1,0}) while(%saved), condition=%c, body=%b
  %logits = f32[4,50]{1,0} fusion(%gathered), calls=%f, metadata={op_name="jit(step)/jvp()/loss/while/body/dot"}
  ROOT %later = f32[25]{0} copy(%gathered)
}
"""


def test_a_ledger_tells_every_byte_once() -> None:
    shapes = ModelShapes.of(2, [(8, 128)])
    found = ledger(ASSIGNMENT, LIVE, parse(PROGRAM), {"weights": 4096, "batch": 0}, 5096, shapes)
    assert found == {"weights": 4096, ACTIVATIONS: 400, GATHERED: 300, LOSS: 200, GAPS: 100}
    assert sum(found.values()) == 5096


def test_only_the_heap_of_hbm_counts() -> None:
    assert {value.name for value in temporaries(ASSIGNMENT, LIVE)} == {
        "gathered",
        "saved",
        "saved.again",
        "logits",
        "later",
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_fullest_moment_against_painting_bytes(seed: int) -> None:
    draw = random.Random(seed)
    values = [
        Value(
            f"v{n}",
            (),
            draw.randrange(64),
            draw.randrange(1, 24),
            begins := draw.randrange(30),
            begins + draw.randrange(8),
            content=0,
        )
        for n in range(25)
    ]
    painted = max(
        len({byte for v in values if v.begins <= t <= v.ends for byte in range(v.offset, v.offset + v.size)})
        for t in range(40)
    )
    assert sum(size for _, size in alive_at_peak(values)) == painted


def test_pages_of_a_heap_follow_each_other() -> None:
    """jax 0.12 writes `page 0`. Offsets count from the start of their page."""
    paged = ASSIGNMENT.replace("1000, preallocated", "1000, page 0, preallocated")
    assert temporaries(paged, LIVE) == temporaries(ASSIGNMENT, LIVE)
    second = "allocation 9: size 50, page 1, preallocated-temp:\n value: <8 more @0> (size=50,offset=0): f32[12]{0}\n"
    found = temporaries(paged + second, LIVE + "    more{}:1-30\n")
    assert [(value.name, value.offset) for value in found][-1] == ("more", 1000)


def test_gradients_are_weight_shaped_and_backward() -> None:
    program = PROGRAM.replace("jit(step)/jvp()/convert", "jit(step)/transpose(jvp())/dot").replace(
        "all-gather(", "copy("
    )
    found = ledger(ASSIGNMENT, LIVE, parse(program), {}, 1000, ModelShapes.of(2, [(8, 128)]))
    assert found[GRADIENTS] == 300
    assert GATHERED not in found
    assert ledger(ASSIGNMENT, LIVE, parse(program), {}, 1000, ModelShapes.of(2, [(9, 9)]))[WORKING] == 300


def test_bytes_that_only_fill_tiles_are_padding() -> None:
    """`later` is 100 bytes of content; given 160 bytes, 60 are padding. A row of 5 x 4 bytes in a tile of 512, too."""
    assignment = ASSIGNMENT.replace("(size=100,offset=0): f32[25]", "(size=160,offset=0): f32[25]")
    live = LIVE.replace("later{}:25-30", "later{}:0-40").replace("gathered{}:2-20", "gathered{}:45-46")
    found = ledger(assignment, live, parse(PROGRAM), {"weights": 4096, PADDING: 7}, 5103, ModelShapes.of(2, []))
    assert found[PADDING] == 7 + 60
    assert found[WORKING] == 100
    assert sum(found.values()) == 5103
    arguments = "allocation 0: size 512, parameter 0, shape |f32[5]| at ShapeIndex {}:\n" + ASSIGNMENT.replace(
        "parameter 0", "parameter 1"
    )
    assert argument_padding(arguments, ["batch", "weights"]) == {"batch": 492, "weights": 0}


ATTENTION = 'metadata={op_name="jit(step)/jvp()/while/body/attention/dot"}'
GPU_PROGRAM = f"""HloModule jit_step
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
    program = GPU_PROGRAM.replace("fmhaSoftmaxBackward", "none")
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
    module = parse(GPU_PROGRAM)
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
    known = GPU_PROGRAM.replace("bf16[2,2,8,16]{3,2,1,0}, u8[0]", "bf16[2,2,8,16]{3,2,1,0}, u8[512]")
    assert hidden_bytes(parse(known), "allocation 3: size 1, preallocated-temp:\n", "    backward{}:9-12\n") == 0


# The compiler's two texts, cut down to their form, with sizes that can be added up by hand.

REPORT = """Memory Space: default (color=0)
Total bytes: 1000 (1000B)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
       600B( 60%);       600B;            0;                1; f32[150]

Memory Space: vmem (color=1)
Total bytes: 64 (64B)

Memory Space: {host}
Total bytes: 77 (77B)


"""
REPORT_ASSIGNMENT = """BufferAssignment:
allocation 0: size 600, preallocated-temp:
 value: <1 fusion @0> (size=600,offset=0): f32[150]
allocation 1: size 4,{page} parameter 0, shape |s32[]| at ShapeIndex {{}}, maybe-live-out:
allocation 2: size 100,{page} parameter 1, shape |f32[25]| at ShapeIndex {{}}, maybe-live-out:
allocation 3: size 200,{page} parameter 2, shape |f32[50]| at ShapeIndex {{}}, maybe-live-out:
allocation 4: size 48,{page} parameter 3, shape |s32[12]| at ShapeIndex {{}}:
allocation 5: size 500, color 5,{page} parameter 4, shape |f32[125]| at ShapeIndex {{}}:
"""
GROUPS = ["optimizer", "weights", "optimizer", "batch", "optimizer"]


def write(folder: Path, host: str, page: str) -> None:
    (folder / "m.after_optimizations-memory-usage-report.txt").write_text(REPORT.format(host=host))
    (folder / "m.after_optimizations-buffer-assignment.txt").write_text(REPORT_ASSIGNMENT.format(page=page))
    (folder / "m.after_optimizations_before_buffer_assignment.txt").write_text("HloModule m")


@pytest.mark.parametrize(("host", "page"), [("cmem (color=5)", ""), ("host (color=4)", " page 0,")])
def test_ledger_of_both_compilers(tmp_path: Path, host: str, page: str) -> None:
    write(tmp_path, host, page)
    report = memory_report(tmp_path, GROUPS)
    assert (report.peak_bytes, report.weights_bytes, report.optimizer_bytes) == (1000, 100, 204)
    assert (report.batch_bytes, report.working_bytes, report.host_bytes) == (48, 648, 77)


@pytest.mark.parametrize("keep", [0, 20, 40, 200])
def test_half_a_report_is_none(keep: int) -> None:
    with pytest.raises(Unreadable):
        space_totals(REPORT.format(host="host (color=4)")[:keep])


def test_half_an_assignment_is_none() -> None:
    text = REPORT_ASSIGNMENT.format(page="")
    assert argument_bytes(text, GROUPS)["batch"] == 48
    with pytest.raises(Unreadable, match="lacks 2 of the step's 5"):
        argument_bytes(text[: text.index("allocation 4")], GROUPS)


def test_more_arguments_than_the_step_has() -> None:
    with pytest.raises(Unreadable, match="argument 4"):
        argument_bytes(REPORT_ASSIGNMENT.format(page=""), GROUPS[:4])


def test_arguments_larger_than_all(tmp_path: Path) -> None:
    write(tmp_path, "host (color=4)", "")
    path = tmp_path / "m.after_optimizations-memory-usage-report.txt"
    path.write_text(path.read_text().replace("Total bytes: 1000 ", "Total bytes: 300 "))
    with pytest.raises(Unreadable, match="larger than the peak"):
        memory_report(tmp_path, GROUPS)


def test_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="there is no"):
        memory_report(tmp_path, GROUPS)
