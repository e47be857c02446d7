"""Timelines worked out by hand on a machine of round figures: a MiB through HBM takes a second."""

from __future__ import annotations

import gzip
import json
import lzma
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import Module, parse
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.execution import CORE
from forerun.planner.time.prediction import step_time
from forerun.planner.time.simulation import Simulation
from forerun.planner.time.step_time import StepTime
from forerun.planner.trace import ADDED, SimulatedStep, Span, Timeline, encoded, timeline_of, trace_content

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


# The file of a simulated step: strict checks of the format, and the step time as the oracle of its length.

SAMPLE = Path(__file__).parent / "time" / "samples" / "qwen3_06b_tpu7x.txt.xz"
GPU_SAMPLE = SAMPLE.with_name("qwen3_06b_h100.txt.xz")
SLICE = slice_named("tpu7x-2x2x1")

TABLES = """FileNames
1 "/home/someone/site-packages/forerun/nn/attention.py"
2 "/home/someone/own/model.py"

FunctionNames
1 "attend"

FileLocations
1 {file_name_id=1 function_name_id=1 line=17 end_line=17 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=4 end_line=4 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

"""
PART = "bf16[1,4096,128]{2,1,0:T(8,128)(2,1)}"
SMALL = f"""HloModule jit_step

{TABLES}
ENTRY %main (a: {PART}) -> {PART} {{
  %a = {PART} parameter(0)
  %x = {PART} negate(%a), metadata={{op_name="jit(step)/attention/neg" stack_frame_id=1}}
  ROOT %y = {PART} negate(%x), metadata={{op_name="jit(step)/own/neg" stack_frame_id=2}}
}}
"""


@pytest.fixture(scope="module")
def module() -> Module:
    return parse(lzma.decompress(SAMPLE.read_bytes()).decode())


@pytest.fixture(scope="module")
def step(module: Module) -> StepTime:
    return step_time(module, SLICE)


@pytest.fixture(scope="module")
def content(module: Module, step: StepTime) -> dict[str, Any]:
    return trace_content(SimulatedStep(module, SLICE, step, {"job": "tale"}))


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """(start, end), read as Perfetto does: microseconds times 1000, truncated."""
    start, length = int(event["ts"] * 1000.0), int(event["dur"] * 1000.0)
    return start, start + length


def threads(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    return {
        name: [e for e in content["traceEvents"] if e["ph"] == "X" and e["tid"] == number]
        for number, name in names.items()
    }


def leaf_nanoseconds(events: list[dict[str, Any]]) -> int:
    """The sum of the events without another one inside. Raises if two events overlap in part."""
    total = 0
    order = sorted(range(len(events)), key=lambda n: (nanoseconds(events[n])[0], n))
    inner: list[tuple[int, int, bool]] = []  # (start, end, whether another event is inside)
    for number in order:
        start, end = nanoseconds(events[number])
        while inner and inner[-1][1] <= start:
            begun, ended, parent = inner.pop()
            total += 0 if parent else ended - begun
        if inner:
            assert end <= inner[-1][1], f"{events[number]['name']} overlaps the end of the event around it"
            inner[-1] = (*inner[-1][:2], True)
        inner.append((start, end, False))
    return total + sum(0 if parent else end - start for start, end, parent in inner)


def test_every_event_has_the_fields_of_the_format(content: dict[str, Any]) -> None:
    again = json.loads(encoded(content, compress=False))
    assert set(again) == {"displayTimeUnit", "metadata", "traceEvents"}
    for event in again["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert all(isinstance(value, str | int | float | bool) for value in event["args"].values())


def test_operations_add_up_to_the_step(content: dict[str, Any], step: StepTime) -> None:
    lanes = threads(content)
    expected = round(step.mid_seconds * 1e9)
    assert leaf_nanoseconds(lanes["XLA Ops"]) == expected
    assert [nanoseconds(event) for event in lanes["Steps"] + lanes["XLA Modules"]] == [(0, expected)] * 2
    assert content["metadata"]["step_seconds"] == step.mid_seconds


def test_lanes_of_queues_have_no_overlaps(content: dict[str, Any]) -> None:
    lanes = threads(content)
    assert {"Steps", "XLA Modules", "XLA Ops", "DMA between HBM and VMEM"} <= set(lanes)
    for name in set(lanes) - {"Steps", "XLA Modules", "XLA Ops"}:
        spans = sorted(nanoseconds(event) for event in lanes[name])
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), name


def test_bounds_agree_with_the_parts_of_the_step(content: dict[str, Any], step: StepTime) -> None:
    """FLOPs are set only where a matrix unit works, and its time is the part that `plan` reports."""
    operations = threads(content)["XLA Ops"]
    computing = sum(e["dur"] for e in operations if e["args"].get("bound_by") == "compute")
    expected = sum(step.parts_seconds.get(part, 0.0) for part in ("matmul", "attention"))
    assert computing / 1e6 == pytest.approx(expected, rel=0.02)


def test_it_is_labelled_as_simulated(content: dict[str, Any]) -> None:
    names = {e["name"]: e["args"] for e in content["traceEvents"] if e["ph"] == "M"}
    assert "simulated" in names["process_name"]["name"]
    assert "simulated" in names["process_labels"]["labels"]
    assert content["metadata"]["simulated"] is True
    assert content["metadata"]["job"] == "tale"


def test_collapsed_iterations_keep_the_length(module: Module, step: StepTime, content: dict[str, Any]) -> None:
    short = trace_content(SimulatedStep(module, SLICE, step), max_spans=2500)
    assert len(short["traceEvents"]) < len(content["traceEvents"])
    shown = short["metadata"]["loop_iterations_shown"]
    assert isinstance(shown, int)
    assert content["metadata"]["loop_iterations_shown"] == "all"
    operations = threads(short)["XLA Ops"]
    assert leaf_nanoseconds(operations) == round(step.mid_seconds * 1e9)
    assert any(event["args"].get("iterations") for event in operations)


@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_calibration_scales_the_step(module: Module, step: StepTime, factor: float) -> None:
    scaled = step.times(factor)
    lanes = threads(trace_content(SimulatedStep(module, SLICE, scaled), max_spans=2500))
    assert leaf_nanoseconds(lanes["XLA Ops"]) == round(scaled.mid_seconds * 1e9)


def test_a_floor_above_the_simulation_is_visible(module: Module, step: StepTime) -> None:
    floor = step.mid_seconds + 0.25
    raised = replace(step, mid_seconds=floor, floor_seconds=floor)
    operations = threads(trace_content(SimulatedStep(module, SLICE, raised), max_spans=2500))["XLA Ops"]
    [added] = [event for event in operations if event["name"] == ADDED]
    assert added["dur"] == pytest.approx(0.25e6, rel=1e-6)
    assert leaf_nanoseconds(operations) == round(floor * 1e9)


def test_source_and_place_in_the_model() -> None:
    """A MiB read and one written. The folders of the machine are not part of a file that users share."""
    small = parse(SMALL)
    operations = threads(trace_content(SimulatedStep(small, SLICE, step_time(small, SLICE))))["XLA Ops"]
    assert [(e["name"], e["args"]["source"], e["args"]["tf_op"]) for e in operations] == [
        ("x", "forerun/nn/attention.py:17", "jit(step)/attention/neg"),
        ("y", "model.py:4", "jit(step)/own/neg"),
    ]
    assert {e["args"]["bytes_accessed"] for e in operations} == {2 * 2**20}
    assert {e["args"]["bound_by"] for e in operations} == {"HBM"}


def test_compression_keeps_the_content(content: dict[str, Any]) -> None:
    packed = encoded(content, compress=True)
    assert json.loads(gzip.decompress(packed)) == json.loads(encoded(content, compress=False))
    assert packed == encoded(content, compress=True)


def test_a_gpu_program() -> None:
    gpu, module = slice_named("h100-8"), parse(lzma.decompress(GPU_SAMPLE.read_bytes()).decode())
    step = step_time(module, gpu)
    content = trace_content(SimulatedStep(module, gpu, step))
    lanes = threads(content)
    assert leaf_nanoseconds(lanes["XLA Ops"]) == round(step.mid_seconds * 1e9)
    assert {event["args"]["bound_by"] for event in lanes["NCCL within the machine"]} == {"NVLink"}
    assert "NCCL between machines" not in lanes
    process = next(e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name")
    assert process.startswith("/device:GPU:0")
    two_machines = trace_content(SimulatedStep(module, slice_named("h100-4x2"), step))
    assert {e["args"]["bound_by"] for e in threads(two_machines)["NCCL between machines"]} == {"network"}
