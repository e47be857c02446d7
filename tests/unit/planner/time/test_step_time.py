"""Ranges of step times: widths by hand, and how they depend on the parts of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import step_time, tpu_simulation
from forerun.planner.time.step_time import (
    COMMON,
    RELATIVE,
    Calibration,
    RangeTerm,
    StepTime,
    calibration,
    part_terms,
    remaining_share,
    time_range,
)
from forerun.planner.time.tpu_range import range_terms, seconds_by_cause

SHARES = st.dictionaries(st.sampled_from(sorted(RELATIVE)), st.floats(0, 1), max_size=len(RELATIVE))
LAYERS, GATHERED = 8, 4096
V6E_8 = slice_named("v6e-8")
WEIGHT = f"bf16[{GATHERED},{GATHERED}]{{1,0:T(8,128)(2,1)}}"
SHARD = f"bf16[{GATHERED // 8},{GATHERED}]{{1,0:T(8,128)(2,1)}}"
GATHER = f"{WEIGHT} all-gather(%shard), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}"


def program(weight: str, tokens: int = 32768) -> str:
    """Return a program with one matmul. `weight` is the instruction that makes its second operand."""
    rows = f"bf16[{tokens},{GATHERED}]{{1,0:T(8,128)(2,1)}}"
    return f"""HloModule m

%mul (a: {rows}, b: {WEIGHT}) -> {rows} {{
  %a = {rows} parameter(0)
  %b = {WEIGHT} parameter(1)
  ROOT %c = {rows} convolution(%a, %b), dim_labels=bf_io->bf
}}

ENTRY %main (x: {rows}, shard: {SHARD}, whole: {WEIGHT}) -> {rows} {{
  %x = {rows} parameter(0)
  %shard = {SHARD} parameter(1)
  %whole = {WEIGHT} parameter(2)
  %weight = {weight}
  ROOT %y = {rows} fusion(%x, %weight), kind=kOutput, calls=%mul
}}
"""


def width(found: StepTime) -> float:
    return found.high_factor / found.low_factor


def test_the_range_by_hand() -> None:
    terms = [RangeTerm("one", 0.5, 0.03, 0.08), RangeTerm("two", 0.2, 0.0, 0.0)]
    found = time_range(terms, scale=2.0)
    # Quadrature with the common term of 5 and 13 %: sqrt(0.03^2 + 0.05^2) = 0.0583, sqrt(0.08^2 + 0.13^2) = 0.1526.
    assert (COMMON.shorter, COMMON.longer) == (0.05, 0.13)
    assert found.low_factor == pytest.approx(1 / (1 + 2 * 0.0034**0.5))
    assert found.high_factor == pytest.approx(1 + 2 * 0.0233**0.5)
    assert [reason.cause for reason in found.reasons] == ["one"]


def test_a_part_counts_with_its_share() -> None:
    [found] = part_terms({"matmul": 0.4, "attention kernels": 0.0})
    assert found == RangeTerm("matmul", 0.4, 0.4 * 0.05, 0.4 * 0.05)


@given(shares=SHARES, cause=st.sampled_from(sorted(RELATIVE)), more=st.floats(0.01, 1))
def test_more_of_an_uncertain_part_never_narrows_the_range(shares: dict[str, float], cause: str, more: float) -> None:
    narrow = time_range(part_terms(shares))
    wide = time_range(part_terms({**shares, cause: shares.get(cause, 0.0) + more}))
    assert 0 < wide.low_factor <= narrow.low_factor < 1 < narrow.high_factor <= wide.high_factor
    assert len(wide.reasons) <= 3


@given(shares=SHARES)
def test_reasons_are_ordered_by_their_effect(shares: dict[str, float]) -> None:
    effects = [reason.effect for reason in time_range(part_terms(shares)).reasons]
    assert effects == sorted(effects, reverse=True)


@given(
    mid=st.floats(0.01, 100),
    floor=st.floats(0, 1),
    low=st.floats(0.3, 1),
    factor=st.floats(0.2, 5),
    runs=st.integers(1, 100),
)
def test_no_range_has_a_time_below_the_roofline(mid: float, floor: float, low: float, factor: float, runs: int) -> None:
    step = StepTime(mid, {"matmul": mid}, floor_seconds=floor * mid, low_factor=low)
    for one in (step, Calibration({"v6e": factor}, {"v6e": runs}).applied(step, "v6e")):
        assert step.floor_seconds <= one.low_seconds <= one.mid_seconds * (1 + 1e-9) < one.high_seconds


def test_collectives_that_are_not_hidden_widen_the_range() -> None:
    without = step_time(parse(program(f"{WEIGHT} copy(%whole)")), V6E_8)
    with_gather = step_time(parse(program(GATHER)), V6E_8)
    short = step_time(parse(program(GATHER, tokens=4096)), V6E_8)
    shares = [
        one.parts_seconds.get("collectives not hidden", 0) / one.mid_seconds for one in (without, with_gather, short)
    ]
    assert shares[0] == 0 < shares[1] < shares[2]
    collectives = [
        next((x for x in range_terms(tpu_simulation(parse(text), V6E_8), one.mid_seconds) if "coll" in x.cause), None)
        for text, one in ((program(GATHER), with_gather), (program(GATHER, tokens=4096), short))
    ]
    assert collectives[0]
    assert collectives[1]
    assert 0 < collectives[0].longer < collectives[1].longer
    # All of it is exposed, and 1.35 times slower or faster.
    assert collectives[1].longer == pytest.approx(0.35 * shares[2], rel=0.01)
    assert collectives[1].shorter == pytest.approx((1 - 1 / 1.35) * shares[2], rel=0.01)


def test_recomputed_work_counts_twice() -> None:
    plain = parse(program(f"{WEIGHT} copy(%whole)"))
    again = parse(program(f"{WEIGHT} copy(%whole)").replace("%y = ", "%y.remat = "))
    causes = [seconds_by_cause(tpu_simulation(module, V6E_8)) for module in (plain, again)]
    assert "recomputation for lack of HBM" not in causes[0]
    assert causes[1]["recomputation for lack of HBM"] == pytest.approx(causes[1]["matmul"] + 0.4e-6)
    assert causes[0]["matmul"] == causes[1]["matmul"]
    assert width(step_time(again, V6E_8)) > width(step_time(plain, V6E_8))


def test_a_custom_model_and_an_unknown_generation_widen_the_range() -> None:
    module = parse(program(f"{WEIGHT} copy(%whole)"))
    assert width(step_time(module, V6E_8, own_model=True)) > width(step_time(module, V6E_8))
    known, unknown = (slice_named(name) for name in ("v4-8", "v3-8"))
    assert step_time(module, unknown).low_factor < step_time(module, known).low_factor


def test_own_runs_narrow_the_range() -> None:
    """Half of the variance is shared by all runs on a chip: with many runs, the other half remains."""
    assert remaining_share(0) == pytest.approx(1)
    assert remaining_share(1) == pytest.approx(0.75**0.5)
    assert remaining_share(10**9) == pytest.approx(0.5**0.5)
    step = StepTime(2.0, {"matmul": 2.0}, low_factor=0.8, high_factor=1.2)
    found = Calibration({"v6e": 1.5}, {"v6e": 1}, {"v6e": 0.0}).applied(step, "v6e")
    assert found.mid_seconds == pytest.approx(3.0)
    assert found.high_factor == pytest.approx(1 + 0.2 * 0.75**0.5)
    assert found.low_factor == pytest.approx(1 / (1 + 0.25 * 0.75**0.5))
    assert Calibration({"v6e": 1.5}, {"v6e": 1}).applied(step, "v4") == step


def test_the_range_has_the_spread_of_own_runs(tmp_path: Path) -> None:
    for name, measured in (("a", 0.8), ("b", 1.0), ("c", 1.5)):
        folder = tmp_path / name
        folder.mkdir()
        summary = {"predicted_step_seconds": 1.0, "step_seconds": measured, "device": {"chip": "v6e"}}
        (folder / "summary.json").write_text(json.dumps(summary))
    found = calibration([str(tmp_path / name) for name in "abc"])
    assert found.spreads == {"v6e": pytest.approx(0.5)}
    step = found.applied(StepTime(1.0, {"matmul": 1.0}, low_factor=0.9, high_factor=1.1), "v6e")
    assert (step.low_seconds, step.high_seconds) == pytest.approx((1 / 1.5, 1.5))
