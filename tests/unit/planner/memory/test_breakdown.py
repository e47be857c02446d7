"""The ledger against hand-made heaps: every byte is told once, and the sum is the compiler's total."""

from __future__ import annotations

import random

import pytest

from forerun.planner.hlo import parse
from forerun.planner.memory.breakdown import (
    ACTIVATIONS,
    GAPS,
    GATHERED,
    GRADIENTS,
    LOSS,
    PADDING,
    WORKING,
    ModelShapes,
    Value,
    alive_at_peak,
    ledger,
    temporaries,
)
from forerun.planner.memory.memory_report import argument_padding

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
