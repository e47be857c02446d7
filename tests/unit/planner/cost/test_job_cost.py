"""Hours and dollars against sums done by hand, and the spot allowance against simulated preemptions."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from error_assertions import assert_error, raises_error
from fit_results import fit_result, request

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.chips import chip_named
from forerun.hardware.slices import slice_named
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import (
    ASSUMPTIONS,
    Assumptions,
    RunCost,
    Saves,
    Tariff,
    aligned,
    assumption_rows,
    best_interval,
    job_cost_of,
    lost_share,
    possible_slices,
    saves_of,
    teacher_cost,
)
from forerun.planner.report.plan_notes import save_notes
from forerun.planner.time.chip_model import chip_model_of
from forerun.units import GIB, Bytes, Seconds

PRICES = """generation,zone,usd_per_chip_hour_on_demand,usd_per_chip_hour_spot,date
v6e,here,3.00,0.10,2026-11-01
v6e,there,2.00,,2026-11-01
"""


def verdict_on(name: str, seconds: float | None = 2.0, **job: object) -> FitResult:
    return fit_result(request(name, **{"batch": 1024, "steps": 1000, **job}), seconds)


@pytest.fixture
def own(tmp_path: Path) -> Tariff:
    file = tmp_path / "prices.csv"
    file.write_text(PRICES)
    return Tariff(prices_file=str(file))


def saves(every: int, count: int, pause: float, write: float = 0.0) -> Saves:
    return Saves(every, count, Bytes(0), Seconds(pause), Seconds(write))


def test_on_demand_by_hand(own: Tariff) -> None:
    bill = job_cost_of(verdict_on("v6e-8", checkpoint={"every": 100}), own)
    assert bill is not None
    copy = 3 * GIB / chip_model_of(chip_named("v6e")).host_bytes_per_second
    write = 8 * 3 * GIB / 0.5e9  # one host
    seconds = 240 + 120 + 1000 * 2.0 + 10 * (1 + copy) + write
    assert bill.hours.mid == pytest.approx(seconds / 3600)
    assert bill.on_demand is not None
    assert bill.on_demand.price.zone == "there"
    assert bill.on_demand.usd.mid == pytest.approx(seconds / 3600 * 8 * 2.00)
    assert bill.hours.low < bill.hours.mid < bill.hours.high


def test_spot_takes_the_zone_that_has_it(own: Tariff) -> None:
    bill = job_cost_of(verdict_on("v6e-8"), own)
    assert bill is not None
    assert bill.spot is not None
    assert bill.spot_hours is not None
    assert bill.spot.price.zone == "here"
    assert bill.spot.usd.mid / 8 / 0.10 > bill.hours.mid  # more hours are billed than undisturbed
    assert bill.spot_hours.mid > bill.spot.usd.mid / 8 / 0.10  # and some are waited for


def test_a_zone_without_a_price_for_the_chip_costs_unknown() -> None:
    bill = job_cost_of(verdict_on("v5p-8"), Tariff(zone="us-central2-b"))  # v4 only
    assert bill is not None
    assert (bill.on_demand, bill.spot) == (None, None)
    assert not bill.within(1e9)
    assert bill.within(None)
    assert bill.hours.mid > 0


def test_no_price_of_tpu7x_is_known() -> None:
    bill = job_cost_of(verdict_on("tpu7x-2x2x1"), Tariff())
    assert bill is not None
    assert bill.on_demand is None


def test_gpu_machines_cost_their_number_of_gpus_and_machines() -> None:
    """$3.99 per GPU-hour in a machine with eight GPUs, and no spot price."""
    tariff = Tariff(providers=("lambda",))
    for name, gpus in (("h100-8", 8), ("h100-8x2", 16)):
        bill = job_cost_of(verdict_on(name), tariff)
        assert bill is not None
        assert bill.on_demand is not None
        assert bill.on_demand.usd.mid == pytest.approx(bill.hours.mid * gpus * 3.99)
        assert (bill.on_demand.price.provider, bill.spot) == ("lambda", None)


def test_the_cheapest_provider_of_each_machine_and_of_spot() -> None:
    machine = slice_named("a100-80-8")
    on_demand, spot = Tariff().price_of(machine), Tariff().price_of(machine, spot=True)
    assert on_demand is not None
    assert spot is not None
    assert (on_demand.provider, on_demand.usd_per_chip_hour_on_demand) == ("primeintellect", 1.035)
    assert (spot.provider, spot.usd_per_chip_hour_spot) == ("azure", 0.45059)


def test_unknown_provider_is_reported_before_compiling() -> None:
    with raises_error("E-HARDWARE-021"):
        Tariff(providers=("gpc",)).check()


def test_what_does_not_fit_has_no_bill() -> None:
    assert job_cost_of(verdict_on("v6e-1", None), Tariff()) is None


def test_unknown_zone_is_told_before_compiling() -> None:
    with pytest.raises(UserError, match="'us-central9-a'"):
        Tariff(zone="us-central9-a").check()


def test_within_the_budget_by_the_cheaper_way(own: Tariff) -> None:
    bill = job_cost_of(verdict_on("v6e-8"), own)
    assert bill is not None
    assert bill.on_demand is not None
    assert bill.spot is not None
    spot, on_demand = bill.spot.usd.mid, bill.on_demand.usd.mid
    assert spot < on_demand
    assert bill.within((spot + on_demand) / 2)
    assert not bill.within(spot * 0.99)


def test_every_array_is_written_once_however_many_copies() -> None:
    split = job_cost_of(verdict_on("v6e-8"), Tariff())
    copies = job_cost_of(verdict_on("v6e-8", mesh={"data": 4, "fsdp": 2}), Tariff())
    assert split is not None
    assert copies is not None
    assert split.saves.state_bytes == 8 * 3 * GIB
    assert copies.saves.state_bytes == 2 * 3 * GIB


@pytest.mark.parametrize(("steps", "every", "count", "kept"), [(1000, 100, 10, 2), (1001, 100, 11, 2), (5, 100, 1, 1)])
def test_bytes_on_disk(steps: int, every: int, count: int, kept: int) -> None:
    bill = job_cost_of(verdict_on("v6e-8", steps=steps, checkpoint={"every": every}), Tariff())
    assert bill is not None
    state = 8 * 3 * GIB
    assert bill.saves.count == count
    assert bill.written_bytes == count * state + steps * 200
    assert bill.kept_bytes == kept * state + steps * 200


def test_a_save_waits_for_the_one_before() -> None:
    one = saves(10, 1, pause=2, write=30)
    assert one.stall_seconds(interval_seconds=40) == 2
    assert one.stall_seconds(interval_seconds=25) == 7


def simulated(run: RunCost, step: float, seed: int) -> float:
    """One run, preempted at random: what is billed."""
    dice = random.Random(seed)
    between = 3600 / run.assumptions.preemptions_per_hour
    begin = run.assumptions.start_seconds + run.assumptions.compile_seconds
    segment = run.saves.every * step + run.saves.pause_seconds
    billed, done, need = begin, 0, segment
    while done < run.saves.count:
        life = dice.expovariate(1 / between)
        if life >= need:
            billed, done, need = billed + need, done + 1, segment
        else:
            billed, need = billed + life, begin + segment
    return billed


@pytest.mark.parametrize(("rate", "every"), [(0.25, 100), (2.0, 100), (2.0, 900)])
def test_the_spot_allowance_is_what_preemptions_cost_on_average(rate: float, every: int) -> None:
    run = RunCost(9000, saves(every, 9000 // every, pause=3), Assumptions(preemptions_per_hour=rate))
    average = sum(simulated(run, 2.0, seed) for seed in range(1500)) / 1500
    assert run.spot_seconds(2.0) == pytest.approx(average, rel=0.03)


def test_the_recommended_interval_is_the_best() -> None:
    def billed(every: int) -> float:
        return RunCost(100_000, saves(every, math.ceil(100_000 / every), pause=5)).spot_seconds(1.0)

    best = RunCost(100_000, saves(100, 1000, pause=5)).best_every(1.0)
    assert best == round(math.sqrt(2 * 5 * 4 * 3600))
    assert billed(best) < min(billed(best // 2), billed(best * 2))
    assert billed(best) == pytest.approx(min(billed(every) for every in range(50, 2000, 10)), rel=1e-3)


def test_no_save_is_recommended_before_the_last_is_written() -> None:
    assert RunCost(100_000, saves(100, 1000, pause=1, write=5000)).best_every(1.0) == 5000
    assert RunCost(50, saves(100, 1, pause=1)).best_every(1.0) == 50


def test_hopeless_on_spot() -> None:
    bill = job_cost_of(verdict_on("v6e-8", seconds=3600.0, checkpoint={"every": 1000}), Tariff())
    assert bill is not None
    assert (bill.spot, bill.spot_hours) == (None, None)
    assert bill.on_demand is not None


def test_every_assumption_says_where_it_is_from() -> None:
    rows = assumption_rows()
    assert [name for name, *_ in rows] == list(Assumptions.__dataclass_fields__)
    assert all(all(row) for row in rows)
    assert all("2026" in source for *_, source in rows)
    assert Assumptions() == ASSUMPTIONS


def test_the_docs_show_the_same_table() -> None:
    text = (Path(__file__).parents[4] / "docs" / "how-to" / "plan.md").read_text("utf-8")
    for name, *cells in assumption_rows():
        assert f"| `{name}` | {' | '.join(cells)} |" in text


@pytest.mark.parametrize("steps", [1, 99, 100, 101, 250])
def test_a_slower_step_never_makes_a_shorter_run(steps: int) -> None:
    """Of a write of 500 s: the first save has none before it to wait for, however few steps come before it."""
    run = RunCost(steps, saves(every=100, count=math.ceil(steps / 100), pause=1.0, write=500.0))
    seconds = [run.seconds(step) for step in (0.1, 0.5, 1.0, 5.0, 10.0)]
    assert seconds == sorted(seconds)
    assert run.work_seconds(1.0) == pytest.approx(steps + math.ceil(steps / 100) * 1.0 + (steps - 1) // 100 * 400 + 500)


def test_a_teachers_cache_by_hand(own: Tariff) -> None:
    """1000 rows by 128 are 8 batches; of the weights each of 8 chips has 1 GiB."""
    bill = teacher_cost(verdict_on("v6e-8", batch=128), 1000, own)
    assert bill is not None
    before = 240 + 120 + 8 * GIB / 0.5e9
    assert bill.begin_seconds == pytest.approx(before)
    assert bill.hours.mid == pytest.approx((before + 8 * 2.0) / 3600)
    assert bill.on_demand is not None
    assert bill.on_demand.usd.mid == pytest.approx((before + 8 * 2.0) / 3600 * 8 * 2.00)


def test_a_teacher_is_cached_by_one_host_and_other_slices_are_reported() -> None:
    job = verdict_on("v6e-8", devices=2).question.job
    possible, impossible = possible_slices(job, [slice_named(name) for name in ("v6e-8", "v5e-16", "v6e-1")])
    assert [one.name for one in possible] == ["v6e-8"]
    assert [one.slice.name for one in impossible] == ["v5e-16", "v6e-1"]
    with pytest.raises(UserError) as refused:
        possible_slices(job, [slice_named("v5e-16")])
    assert_error(refused.value, "E-PLAN-014", what="v5e-16 has 4", fix="--on v6e-8;")


def test_idle_devices_are_paid_for_and_save_nothing() -> None:
    alone, everyone = verdict_on("v3-8", devices=1), verdict_on("v3-8")
    bills = [job_cost_of(v, Tariff()) for v in (alone, everyone)]
    assert all(bill and bill.on_demand for bill in bills)
    rates = [bill.on_demand.usd.mid / bill.hours.mid for bill in bills if bill and bill.on_demand]
    assert rates[0] == pytest.approx(rates[1]), "the price is for the complete slice"
    assert saves_of(alone).state_bytes == 3 * GIB, "what one device holds"
    assert saves_of(everyone).state_bytes == 24 * GIB
    assert alone.mfu == pytest.approx(8 * (everyone.mfu or 0)), "of the devices in use, as train counts it"


# The default of checkpoint.every, by an exhaustive search over plan's own model of a run.

TIMES = {"between_seconds": 4 * 3600}


def large_run(name: str, **job: object) -> FitResult:
    """The state of a model with 3B parameters."""
    wanted = {"model": "llama3.2-3b", "batch": 32, "sequence": 2048, "steps": 100_000, **job}
    return fit_result(request(name, **wanted), 0.47, saved_bytes=37 * 10**9)


def billed_seconds(verdict: FitResult, every: int) -> float:
    bill = job_cost_of(verdict, Tariff())
    assert bill is not None
    assert verdict.question.job.steps is not None
    steps = verdict.question.job.steps
    saves = Saves(every, math.ceil(steps / every), *list(vars(bill.saves).values())[2:])
    return RunCost(steps, saves).spot_seconds(0.47)


def test_auto_is_the_best_of_all_intervals() -> None:
    verdict = large_run("v6e-8")
    bill = job_cost_of(verdict, Tariff())
    assert bill is not None
    assert bill.saves.every == bill.best_every
    assert bill.save_waste == 0
    best = min(billed_seconds(verdict, every) for every in range(10, 5000, 10))
    assert billed_seconds(verdict, bill.saves.every) < 1.01 * best
    assert str(bill.saves.every) in save_notes([(verdict, bill)])[0]


@pytest.mark.parametrize(("every", "warned"), [(100, True), (400, False), (600, False), (50_000, True)])
def test_a_number_that_wastes_time_is_warned_about(every: int, warned: bool) -> None:
    verdict = large_run("v6e-8", checkpoint={"every": every})
    bill = job_cost_of(verdict, Tariff())
    assert bill is not None
    assert bill.saves.every == every
    expected = max(0.0, billed_seconds(verdict, every) / billed_seconds(verdict, bill.best_every) - 1)
    assert bill.save_waste == pytest.approx(expected)
    assert (expected > 0.05) == warned
    notes = save_notes([(verdict, bill)])
    assert bool(notes) == warned
    assert all(f"checkpoint.every={bill.best_every}" in note for note in notes)


def test_a_short_run_saves_ten_times_if_that_is_cheap() -> None:
    assert best_interval(200, 0.3, pause_seconds=0.02, write_seconds=0.1, **TIMES) == 20
    assert best_interval(200, 0.3, pause_seconds=1, write_seconds=1, **TIMES) == 200, "ten saves would cost a sixth"
    assert best_interval(200, 0.3, pause_seconds=0.02, write_seconds=30, **TIMES) == 100
    assert best_interval(10**6, 1.0, pause_seconds=2, write_seconds=1, **TIMES) == 240
    assert best_interval(5, 1e-6, pause_seconds=0.0, write_seconds=0.0, **TIMES) >= 1


def test_lost_time_by_hand() -> None:
    lost = lost_share(100, 0.5, pause_seconds=2, write_seconds=60, **TIMES)
    assert lost == pytest.approx((2 + 10) / 50 + 50 / (2 * 14400))


@pytest.mark.parametrize(
    ("validation", "keep_best", "share", "expected"),
    [({"every": 150}, 1, 0.1, 450), ({}, 1, 0.1, 400), ({"every": 150}, 0, 0.1, 386), ({"every": 150}, 1, 0.0, 386)],
)
def test_the_best_checkpoints_are_saved_with_an_evaluation(
    validation: dict[str, int], keep_best: int, share: float, expected: int
) -> None:
    fields = {"validation": validation, "checkpoint": {"keep_best": keep_best}}
    job = Job.model_validate({"model": "llama3.2-3b", "data": {"path": "x", "validation": share}, **fields})
    assert aligned(job, 386) == expected
