"""Timelines worked out by hand on a machine of round figures: a MiB through HBM takes a second."""

from __future__ import annotations

import pytest

from forerun.planner.hlo import parse
from forerun.planner.time.activity import CORE
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.simulation import Simulation
from forerun.planner.trace.timeline import Span, Timeline, timeline_of

MIB = 2**20
MACHINE = ChipModel(
    clock_hz=1e9,  # vector arithmetic takes no time
    matmul_flops=1.0,
    matmul_share=1.0,
    hbm_bytes_per_second=MIB,
    link_bytes_per_second=MIB,
    host_bytes_per_second=MIB / 4,
    matrix_unit=1,
    op_seconds=0.0,
    dma_seconds=0.0,
    hop_seconds=0.0,
    collective_seconds=0.0,
)
PART = "bf16[1,4096,128]{2,1,0:T(8,128)(2,1)}"  # one MiB
TWO = "bf16[2,4096,128]{2,1,0:T(8,128)(2,1)}"
STATE = f"(s32[], {PART})"
GATHER = f"({PART}, {TWO}) all-gather-start(%a), replica_groups={{{{0,1}}}}, dimensions={{0}}"  # half a second
FOUR_TIMES = 'backend_config={"known_trip_count":{"n":"4"}}'


def loop(body: str) -> str:
    return f"""%body (p: {STATE}) -> {STATE} {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = {PART} get-tuple-element(%p), index=1
{body}
  ROOT %r = {STATE} tuple(%i, %x)
}}

%condition (p: {STATE}) -> pred[] {{
  %p = {STATE} parameter(0)
  ROOT %c = pred[] constant(true)
}}
"""


def played(entry: str, others: str = "", max_spans: int = 1000) -> Timeline:
    text = f"""HloModule m

{others}
ENTRY %main (a: {PART}) -> () {{
  %a = {PART} parameter(0)
{entry}
}}
"""
    return timeline_of(Simulation(parse(text), MACHINE, "v5e"), max_spans)


def leaves(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.lane == CORE and span.is_leaf]


def times(spans: list[Span]) -> list[tuple[str, float, float]]:
    return [(span.name, span.start_seconds, span.end_seconds) for span in spans]


START = f"  %z = s32[] constant(0)\n  %s = {STATE} tuple(%z, %a)\n"
LOOP = f"{START}  %l = {STATE} while(%s), condition=%condition, body=%body, {FOUR_TIMES}"


def test_core_and_queue() -> None:
    """The gather runs from 0 to 0.5 beside the first operation, so nothing waits for it."""
    timeline = played(f"  %g = {GATHER}\n  %x = {PART} negate(%a)\n  %d = {TWO} all-gather-done(%g)")
    assert times(leaves(timeline)) == [("x", 0.0, 2.0)]
    [sent] = [span for span in timeline.spans if span.lane == "ici"]
    assert (sent.name, sent.start_seconds, sent.end_seconds) == ("g", 0.0, 0.5)
    assert sent.activity is not None
    assert sent.activity.size_bytes == MIB


def test_wait_is_a_span_of_the_core() -> None:
    timeline = played(f"  %g = {GATHER}\n  %d = {TWO} all-gather-done(%g)")
    assert times(leaves(timeline)) == [("d", 0.0, 0.5)]


def test_loop_is_unrolled() -> None:
    timeline = played(f"  %b = {PART} negate(%a)\n{LOOP}", loop(f"  %x = {PART} negate(%a)"))
    assert times(leaves(timeline)) == [("b", 0, 2), ("x", 2, 4), ("x", 4, 6), ("x", 6, 8), ("x", 8, 10)]
    around = [span for span in timeline.spans if not span.is_leaf]
    assert [(span.depth, span.start_seconds, span.end_seconds) for span in around] == [
        (0, 2, 10),
        (1, 2, 4),
        (1, 4, 6),
        (1, 6, 8),
        (1, 8, 10),
    ]
    assert timeline.seconds == 10
    assert timeline.shown_iterations is None


def test_iterations_beyond_the_limit_are_one_span() -> None:
    timeline = played(LOOP, loop(f"  %x = {PART} negate(%a)"), max_spans=10)
    *shown, rest = leaves(timeline)
    assert times(shown) == [("x", 0, 2), ("x", 2, 4)]
    assert (rest.start_seconds, rest.end_seconds, rest.iterations) == (4, 8, 2)
    assert timeline.shown_iterations == 2
    assert len(timeline.spans) <= 10


def test_queue_that_sets_the_pace() -> None:
    """The core works for two seconds per iteration, and the host sends for four: the core waits for the rest."""
    host = PART.replace("(2,1)}", "(2,1)S(5)}")
    body = f"  %g = ({host}, {PART}, u32[]) copy-start(%a)\n  %x = {PART} negate(%a)"
    timeline = played(LOOP, loop(body))
    assert timeline.seconds == pytest.approx(16, abs=1e-4)
    waits = [span for span in leaves(timeline) if span.name != "x"]
    assert [span.start_seconds for span in waits] == pytest.approx([2, 6, 10, 14], abs=1e-4)
    assert [span.seconds for span in waits] == pytest.approx([2, 2, 2, 2], abs=1e-4)
    sent = [span for span in timeline.spans if span.lane == "to host"]
    assert [span.start_seconds for span in sent] == pytest.approx([0, 4, 8, 12], abs=1e-4)
