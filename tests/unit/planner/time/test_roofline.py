"""No predicted time is below the chip's peak rates: bytes and FLOPs by hand."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from forerun.hardware.chips import chip_named
from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.execution import Spent
from forerun.planner.time.prediction import OWN_MODEL, ROOFLINE, SHORT, UNKNOWN_CHIP, step_time
from forerun.planner.time.roofline import PeakRates, time_floor
from forerun.planner.time.simulation import Simulation
from forerun.planner.time.step_time import Calibration, StepTime

UNITS, ROWS, TOKENS = 4096, 4, 128
V3_FLOPS, V3_BYTES_PER_SECOND = 123e12 / 2, 900e9 / 2  # of one of the two devices of a chip
MATRIX = f"bf16[{UNITS},{UNITS}]{{1,0:T(8,128)(2,1)}}"
STATE = f"bf16[{ROWS},{UNITS}]{{1,0:T(4,128)(2,1)}}"
# A recurrent network as the compiler schedules it: in each iteration a fusion multiplies the state by a matrix in HBM.
# The matrix passes through a nested fusion that only changes its shape.
RECURRENT = f"""HloModule m

%same (p: {MATRIX}) -> {MATRIX} {{
  %p = {MATRIX} parameter(0)
  ROOT %b = {MATRIX} bitcast(%p)
}}

%tick (state: {STATE}, matrix: {MATRIX}) -> {STATE} {{
  %state = {STATE} parameter(0)
  %matrix = {MATRIX} parameter(1)
  %shaped = {MATRIX} fusion(%matrix), kind=kLoop, calls=%same
  %pull = {STATE} convolution(%state, %shaped), dim_labels=bf_io->bf
  ROOT %next = {STATE} tanh(%pull)
}}

%condition (c: (s32[], {STATE}, {MATRIX})) -> pred[] {{
  %c = (s32[]{{:T(256)}}, {STATE}, {MATRIX}) parameter(0)
  %i = s32[]{{:T(256)}} get-tuple-element(%c), index=0
  %n = s32[]{{:T(256)}} constant({TOKENS})
  ROOT %lt = pred[]{{:T(1024)}} compare(%i, %n), direction=LT
}}

%body (c: (s32[], {STATE}, {MATRIX})) -> (s32[], {STATE}, {MATRIX}) {{
  %c = (s32[]{{:T(256)}}, {STATE}, {MATRIX}) parameter(0)
  %i = s32[]{{:T(256)}} get-tuple-element(%c), index=0
  %state = {STATE} get-tuple-element(%c), index=1
  %matrix = {MATRIX} get-tuple-element(%c), index=2
  %one = s32[]{{:T(256)}} constant(1)
  %after = s32[]{{:T(256)}} add(%i, %one)
  %next = {STATE} fusion(%state, %matrix), kind=kOutput, calls=%tick
  ROOT %t = (s32[]{{:T(256)}}, {STATE}, {MATRIX}) tuple(%after, %next, %matrix)
}}

ENTRY %main (state: {STATE}, matrix: {MATRIX}) -> {STATE} {{
  %state = {STATE} parameter(0)
  %matrix = {MATRIX} parameter(1)
  %zero = s32[]{{:T(256)}} constant(0)
  %carry = (s32[]{{:T(256)}}, {STATE}, {MATRIX}) tuple(%zero, %state, %matrix)
  %loop = (s32[]{{:T(256)}}, {STATE}, {MATRIX}) while(%carry), condition=%condition, body=%body
  ROOT %out = {STATE} get-tuple-element(%loop), index=1
}}
"""
BY_HAND = TOKENS * 2 * UNITS * UNITS / V3_BYTES_PER_SECOND  # 9.5 ms: the matrix is read once for each token


def test_a_matrix_in_hbm_is_read_again_for_each_token() -> None:
    found = step_time(parse(RECURRENT), slice_named("v3-8"))
    assert found.mid_seconds >= BY_HAND
    assert found.low_seconds >= BY_HAND
    assert found.mid_seconds == pytest.approx(BY_HAND, rel=0.3), "little else happens"
    assert found.limit == "HBM"


def test_the_floor_by_hand() -> None:
    state = TOKENS * 2 * ROWS * UNITS / V3_BYTES_PER_SECOND
    floor = time_floor(parse(RECURRENT), PeakRates.of(chip_named("v3")))
    assert floor.memory == pytest.approx(BY_HAND + state)
    assert floor.compute == 0


def test_a_matrix_in_on_chip_memory_is_bound_by_flops() -> None:
    near = RECURRENT.replace("T(8,128)(2,1)}", "T(8,128)(2,1)S(1)}").replace("T(4,128)(2,1)}", "T(4,128)(2,1)S(1)}")
    floor = time_floor(parse(near), PeakRates.of(chip_named("v3")))
    assert floor.memory == 0
    assert floor.compute == pytest.approx(TOKENS * 2 * ROWS * UNITS * UNITS / V3_FLOPS)


def test_a_simulation_below_the_floor_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_fast(simulation: Simulation) -> Spent:
        spent = Spent()
        spent.add("matmul", 1e-6)
        return spent

    monkeypatch.setattr(Simulation, "run", too_fast)
    found = step_time(parse(RECURRENT), slice_named("v3-8"))
    assert found.mid_seconds == found.low_seconds == found.floor_seconds >= BY_HAND
    assert sum(found.parts_seconds.values()) == pytest.approx(found.mid_seconds)
    assert found.limit == "HBM"
    assert ROOFLINE in found.doubts
    flops = V3_FLOPS  # a second of them
    found = step_time(parse(RECURRENT), slice_named("v3-8"), model_flops=flops)
    assert found.mid_seconds == pytest.approx(1.0), "MFU is 100 % at most"


def test_a_calibration_stops_at_the_floor() -> None:
    step = StepTime(1.0, {"matmul": 0.6, "memory-bound rest": 0.4}, floor_seconds=0.9)
    fast = Calibration({"v6e": 0.5}, {"v6e": 1}).applied(step, "v6e")
    assert fast.mid_seconds == fast.low_seconds == pytest.approx(0.9)
    assert sum(fast.parts_seconds.values()) == pytest.approx(0.9)
    slow = Calibration({"v6e": 2.0}, {"v6e": 1}).applied(step, "v6e")
    assert slow.mid_seconds == pytest.approx(2.0)


def test_what_published_runs_do_not_cover_is_marked() -> None:
    found = step_time(parse(RECURRENT), slice_named("v3-8"), own_model=True)
    assert set(found.doubts) == {UNKNOWN_CHIP, OWN_MODEL, SHORT}


def test_a_real_program_is_above_its_floor_and_the_floor_above_its_flops() -> None:
    sample = Path(__file__).parent / "samples" / "qwen3_06b_tpu7x.txt.xz"
    module, chip = parse(lzma.decompress(sample.read_bytes()).decode()), chip_named("tpu7x")
    spent = Simulation(module, chip_model_of(chip), chip.name).run()
    floor = time_floor(module, PeakRates.of(chip))
    assert spent.flops["matmul"] / (2307e12 / 2) <= floor.seconds * 1.0001 <= spent.seconds
