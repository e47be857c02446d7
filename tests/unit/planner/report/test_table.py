"""The table at every width, and the words for a job that fits nowhere."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from error_assertions import assert_error
from fit_results import fit_result, request
from rich.console import Console

from forerun.planner.compile.fit_result import AttentionKernel, FitResult
from forerun.planner.cost.job_cost import Tariff, job_cost_of
from forerun.planner.report.formatting import hours_text, limit_text, usd_text
from forerun.planner.report.plan_json import as_json
from forerun.planner.report.plan_notes import attention_notes
from forerun.planner.report.remedies import Remedy, Tried, does_not_fit, over_budget
from forerun.planner.report.table import print_table
from forerun.planner.time.step_time import RangeTerm, StepTime
from forerun.units import GIB, Seconds


def verdict_on(name: str, peak: float, weights: float, optimizer: float, host: float = 0, **job: object) -> FitResult:
    question = request(name, **{"batch": 1024, **job})
    fits = peak * GIB <= question.slice.chip.usable_bytes
    result = fit_result(question, None, (peak, weights, optimizer, 0.001, host), fits=fits, flops_per_step=1.5e15)
    memory = result.memory
    parts = {"weights": memory.weights_bytes, "optimizer": memory.optimizer_bytes, "batch": memory.batch_bytes}
    parts["working activations"] = memory.working_bytes
    step = StepTime(3.1, {"matmul": 2.0, "collectives not hidden": 1.1}) if fits else None
    return replace(result, ledger=parts, step=step, compile_seconds=Seconds(11.53))


SMALL = verdict_on("v6e-1", 12.44, 2.22, 4.44)
LARGE = verdict_on("v5p-2048", 103.38, 10.5, 21.25)
SPLIT = verdict_on("tpu7x-2x2x1", 94.3, 1, 2, host=3)


def printed(verdicts: list[FitResult], width: int, encoding: str = "utf-8", **options: Any) -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_table(Console(file=file, width=width), verdicts, "q: qwen3-0.6b", **options)
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_nothing_is_cut_at_any_width(width: int) -> None:
    lines = printed([SMALL, LARGE, SPLIT], width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    rows = {line.split()[0]: line for line in lines if line and line.split()[0] in ("v6e-1", "v5p-2048", "tpu7x-2x2x1")}
    assert re.search(r"yes .*12\.44 .*31\.25", rows["v6e-1"])
    assert re.search(r"7\.64 short .*103\.38 .*95\.74", rows["v5p-2048"])
    headings = next(line for line in lines if line.startswith("slice"))
    assert headings.split()[:1] == ["slice"]
    assert "usable" in headings


def test_what_goes_first_when_narrow() -> None:
    wide, middle, narrow = (" ".join(printed([SMALL, LARGE, SPLIT], width)) for width in (200, 140, 60))
    assert "compile s" in wide
    assert "optimizer " in wide.partition("v6e-1")[0]
    assert "█" in middle
    assert "compile s" not in middle
    for heading in ("step", "tokens/s", "MFU", "hours", "demand", "spot", "limit"):
        assert heading in middle
    assert "█" not in narrow
    assert "MFU" not in narrow
    assert "hours" in narrow


def test_time_and_money_of_a_row() -> None:
    row = next(line for line in printed([SMALL], 120) if line.startswith("v6e-1"))
    assert SMALL.step is not None
    low, high = SMALL.step.low_seconds, SMALL.step.high_seconds
    # 1024 x 1024 tokens and 1.5e15 FLOPs in 3.1 s on a chip of 918e12 FLOP/s.
    assert re.search(rf" 3\.10 s +\({low:.2f}-{high:.2f}\) +338k +53% ", row)
    assert row.rstrip().endswith("compute")


def test_a_row_that_does_not_fit_has_no_time_and_no_price() -> None:
    row = next(line for line in printed([LARGE], 120) if line.startswith("v5p-2048"))
    assert row.split()[-7:] == ["-"] * 7


def test_dollars_over_the_limit_are_marked() -> None:
    free, spot = as_json([SMALL])["slices"][0]["cost_usd"].values()
    assert spot < free
    row = next(line for line in printed([SMALL], 120, tariff=Tariff(max_usd=(free + spot) / 2)) if "v6e-1" in line)
    assert row.count("over") == 1
    assert " over " not in " ".join(printed([SMALL], 120, tariff=Tariff(max_usd=free + 1)))


def test_notes_name_zone_date_and_what_has_no_price() -> None:
    text = " ".join(printed([SMALL, SPLIT], 120, notes=["omitted: v9"]))
    assert "prices of 2026-08-21" in text
    assert "known for tpu7x-2x2x1" in text
    assert "omitted: v9" in text
    assert "in zone europe-west4-a" in " ".join(printed([SMALL], 120, tariff=Tariff(zone="europe-west4-a")))


def test_tiny_terminal_breaks_lines_rather_than_figures() -> None:
    assert any("31.25" in line and "12.44" in line for line in printed([SMALL], 20))


def test_devices_are_told_only_where_a_chip_has_two() -> None:
    assert "GiB per chip." in " ".join(printed([SMALL, LARGE], 150))
    lines = " ".join(printed([SMALL, SPLIT], 190))
    assert "chip of tpu7x" in lines
    assert "tpu7x-2x2x1: 3.00 GiB" in lines
    assert re.search(r"tpu7x-2x2x1 +4 +8 ", lines)


def test_bar_is_to_scale() -> None:
    row = next(line for line in printed([SMALL], 120) if line.startswith("v6e-1"))
    used, free = row.count("█"), row.count("·")
    assert used + free in (24, 16, 10)
    assert used == round((used + free) * 12.44 / 31.25)


def test_terminal_without_unicode() -> None:
    assert "#" in " ".join(printed([SMALL, LARGE], 140, encoding="latin-1"))


def test_json_keys_are_frozen() -> None:
    [row] = as_json([SPLIT])["slices"]
    assert list(row) == [
        "slice",
        "platform",
        "fits",
        "hbm_peak_bytes",
        "hbm_limit_bytes",
        "compile_seconds",
        "chips",
        "devices",
        "devices_used",
        "mesh",
        "program",
        "attention",
        "unroll",
        "hbm_weights_bytes",
        "hbm_optimizer_bytes",
        "hbm_batch_bytes",
        "hbm_working_bytes",
        "host_bytes",
        "hbm_ledger",
        "step_seconds",
        "time_breakdown",
        "tokens_per_second",
        "mfu",
        "limit",
        "floor_seconds",
        "uncertain",
        "range_causes",
        "hours",
        "hours_range",
        "cost_usd",
        "zone",
        "provider",
        "within_max_usd",
        "spot",
        "checkpoint_every",
        "checkpoint_waste",
        "checkpoint_bytes",
        "written_bytes",
        "kept_bytes",
        "failures",
        "changes",
        "error",
    ]
    parts = ("weights", "optimizer", "batch", "working")
    assert sum(row[f"hbm_{part}_bytes"] for part in parts) == row["hbm_peak_bytes"]
    assert (row["chips"], row["devices"], row["compile_seconds"]) == (4, 8, 11.53)
    ledger = dict(row["hbm_ledger"])
    assert ledger.pop("host_offloaded") == row["host_bytes"]
    assert sum(ledger.values()) == row["hbm_peak_bytes"]
    assert row["cost_usd"] == row["zone"] == row["provider"] == {"on_demand": None, "spot": None}


def test_json_of_time_and_money() -> None:
    fits, large = as_json([SMALL, LARGE], Tariff(max_usd=1e6), {"v6e-1": ["mesh.data=1 mesh.fsdp=1", "micro_batch=2"]})[
        "slices"
    ]
    assert list(fits["step_seconds"]) == list(fits["hours_range"]) == ["low", "mid", "high"]
    assert fits["step_seconds"]["mid"] == sum(fits["time_breakdown"].values()) == 3.1
    assert fits["hours"] == fits["hours_range"]["mid"]
    assert fits["tokens_per_second"] == pytest.approx(1024 * 1024 / 3.1)
    assert fits["mfu"] == pytest.approx(1.5e15 / 3.1 / 918e12)
    assert list(fits["time_breakdown"]) == ["matmul", "collectives_not_hidden"]
    assert fits["limit"] == "compute"
    assert fits["cost_usd"]["spot"] < fits["cost_usd"]["on_demand"]
    assert (fits["within_max_usd"], large["within_max_usd"]) == (True, False)
    assert fits["changes"] == ["mesh.data=1", "mesh.fsdp=1", "micro_batch=2"]
    for key in (
        "step_seconds",
        "time_breakdown",
        "tokens_per_second",
        "mfu",
        "limit",
        "hours",
        "spot",
        "written_bytes",
        "failures",
    ):
        assert large[key] is None
    json.dumps([fits, large], allow_nan=False)


def test_nothing_within_the_budget() -> None:
    error = over_budget([SMALL, LARGE], Tariff(max_usd=0.001))
    assert error is not None
    assert "v6e-1 spot in " in error.why
    amount = float(error.fix.split()[2].rstrip(","))
    assert over_budget([SMALL, LARGE], Tariff(max_usd=amount)) is None
    unknown = over_budget([SPLIT], Tariff(max_usd=1e6))
    assert unknown is not None
    assert "--prices" in unknown.fix


def test_what_is_said_of_a_job_that_does_not_fit() -> None:
    asked = verdict_on("v5e-8", 20, 0.3, 0.6)
    tried = [
        Tried(Remedy("micro_batch=64", asked.question.job), verdict_on("v5e-8", 14, 0.3, 0.6)),
        Tried(Remedy("remat=full", asked.question.job), verdict_on("v5e-8", 16, 0.3, 0.6)),
    ]
    error = does_not_fit([asked], tried)
    assert_error(error, "E-PLAN-017", what="v5e-8")
    assert re.findall(r"[\d.]+ GiB", error.why) == ["20.00 GiB", "15.75 GiB", "4.25 GiB"]
    assert error.fix.splitlines() == [
        "one of these, each compiled for v5e-8 with the batch unchanged:",
        "- micro_batch=64: fits, 1.75 GiB to spare",
        "- remat=full: still 256 MiB short",
        "or",
        "a slice with more chips or memory: forerun hardware slices",
    ]
    assert "alone are 18.00" in does_not_fit([verdict_on("v5e-8", 20, 6, 12)]).why


def test_the_nearest_slice_is_told() -> None:
    error = does_not_fit([verdict_on("v5e-8", 40, 1, 2), LARGE])
    assert_error(error, "E-PLAN-017", what="2 slices", why="v5p-2048 needs 103.38 GiB")


@pytest.mark.parametrize("width", [80, 120])
def test_the_range_and_the_prices_are_complete_on_usual_terminals(width: int) -> None:
    """The widest rows that occur: a long name, a mark, three-digit times, four-digit prices."""
    long = replace(
        verdict_on("tpu7x-2x2x1", 94.3, 1, 2, steps=500_000), step=StepTime(128.4, {"matmul": 128.4}, doubts=("one",))
    )
    large = verdict_on("v5p-1024", 95.1, 10.5, 21.25, steps=500_000)
    lines = printed([LARGE, large, long], width)
    assert max(map(len, lines)) <= width
    rows = {line.split()[0]: line for line in lines if line.startswith(("v5p-1024", "tpu7x"))}
    assert "~128 s" in rows["tpu7x-2x2x1"]
    assert "(96.3-160)" in rows["tpu7x-2x2x1"]
    assert "(2.33-3.88)" in rows["v5p-1024"]
    bill = job_cost_of(large, Tariff())
    assert bill is not None
    assert bill.on_demand is not None
    assert bill.spot is not None
    for text in (hours_text(bill.hours.mid), usd_text(bill.on_demand.usd.mid), usd_text(bill.spot.usd.mid)):
        assert f" {text} " in f"{rows['v5p-1024']} "


def test_why_a_time_is_uncertain_is_below_the_table() -> None:
    odd = replace(verdict_on("v5e-8", 8, 1, 2), step=StepTime(1.0, {"matmul": 1.0}, doubts=("the moon is full",)))
    text = " ".join(printed([SMALL, odd], 120))
    assert "~1.00 s" in text
    assert "(v5e-8): the moon" in text
    assert "~3.10 s" not in text


def ranged(slice_name: str, cause: str, share: float, high: float) -> FitResult:
    reasons = (RangeTerm("the start of a short step", 1.0, 0.0, 0.2), RangeTerm(cause, share, share / 3, share / 3))
    step = StepTime(1.0, {"matmul": 1.0}, low_factor=1 / high, high_factor=high, range_reasons=reasons)
    return replace(verdict_on(slice_name, 8, 1, 2), step=step)


@pytest.mark.parametrize("width", [80, 120])
def test_the_main_cause_of_a_wide_range_is_below_the_table(width: int) -> None:
    wide = [ranged("v5e-8", "collectives not hidden", 0.22, 1.3), ranged("v6e-8", "collectives not hidden", 0.31, 1.4)]
    lines = printed([*wide, ranged("v5e-16", "matmul", 0.9, 1.08)], width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "(v5e-8, v6e-8): collectives" in text
    assert "start of a short step" not in text, "a doubt has its own line"
    assert "matmul" not in text, "the range of v5e-16 is not wide"
    assert "(0.77-1.30)" in text


def test_causes_of_the_range_in_json() -> None:
    [row] = as_json([ranged("v5e-8", "collectives not hidden", 0.3, 1.2)])["slices"]
    assert row["range_causes"][1] == {
        "cause": "collectives not hidden",
        "share": 0.3,
        "shorter": pytest.approx(0.1),
        "longer": pytest.approx(0.1),
    }


GPU = verdict_on("h100-8", 60, 10, 20)
CONSUMER = verdict_on("4090-1", 30, 10, 20)
ROWS = ("v6e-1", "h100-8", "4090-1")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_plan_of_both_platforms_fits_the_terminal(width: int) -> None:
    lines = printed([SMALL, GPU, CONSUMER], width)
    assert max(map(len, lines)) <= width
    rows = {line.split()[0]: line for line in lines if line.split()[:1] and line.split()[0] in ROWS}
    # 79.1 and 23.5 GiB x 0.90
    assert re.search(r"yes .*60\.00 .*71\.19", rows["h100-8"])
    assert re.search(r"8\.85 short .*30\.00 .*21\.15", rows["4090-1"])
    text = " ".join(" ".join(lines).split())
    assert text.count("Usable GPU memory is 90% of the device's") == 1
    assert "each platform's compiler." in text


def test_a_plan_of_one_platform_has_its_own_words() -> None:
    text = "\n".join(printed([GPU, CONSUMER], 200))
    assert re.search(r"^machine +GPUs ", text, re.MULTILINE)
    assert "GPU compiler's report." in text
    text = "\n".join(printed([SMALL], 200))
    assert re.search(r"^slice +chips ", text, re.MULTILINE)
    assert "GPU" not in text


@pytest.mark.parametrize(
    ("name", "part", "limit"),
    [
        ("v6e-8", "collectives not hidden", "ICI"),
        ("h100-8", "collectives not hidden", "NVLink"),
        ("h100-8x2", "network not hidden", "network"),
        ("v6e-8", "memory-bound rest", "HBM"),
        ("h100-8", "memory-bound rest", "memory"),
        ("h100-8", "matmul", "compute"),
    ],
)
def test_a_limit_has_the_name_of_its_platform(name: str, part: str, limit: str) -> None:
    links = "ICI" if name.startswith("v") else "NVLink"
    made = replace(verdict_on(name, 10, 1, 2), step=StepTime(1.0, {part: 1.0}, links=links))
    assert limit_text(made) == limit
    [row] = as_json([made])["slices"]
    assert (row["limit"], row["platform"]) == (limit, "tpu" if name.startswith("v") else "gpu")


def test_a_job_that_fits_no_gpu_machine() -> None:
    error = does_not_fit([CONSUMER])
    assert_error(error, "E-PLAN-017", why="30.00 GiB per device", fix="a machine with more GPUs or memory")
    assert "2 slices and" in does_not_fit([LARGE, CONSUMER]).what
    assert "2 machines" in does_not_fit([CONSUMER, CONSUMER]).what


def test_notes_name_the_provider_of_each_row() -> None:
    text = " ".join(" ".join(printed([SMALL, GPU], 120)).split())
    row = as_json([GPU])["slices"][0]
    assert row["provider"]["on_demand"] not in (None, "gcp")
    assert f"On demand: v6e-1 from gcp; h100-8 from {row['provider']['on_demand']}." in text
    assert "--provider NAME" in text
    [google] = as_json([GPU], Tariff(providers=("gcp",)))["slices"]
    assert google["provider"] == {"on_demand": "gcp", "spot": "gcp"}
    assert google["cost_usd"]["on_demand"] > row["cost_usd"]["on_demand"]
    assert "from gcp;" not in " ".join(printed([SMALL, GPU], 120, tariff=Tariff(providers=("gcp",))))
    assert "from" not in " ".join(line for line in printed([SMALL], 120) if line.startswith("On demand"))


def test_the_attention_of_gpus_is_reported_with_its_reason() -> None:
    why = "the GPU is old"
    found = [
        replace(verdict_on(name, 12, 2, 4), attention=AttentionKernel(kernel, obstacle))
        for name, kernel, obstacle in (
            ("v6e-1", "splash", None),
            ("h100-1", "cudnn", None),
            ("h100-8", "cudnn", None),
            ("a100-80-1", "xla", why),
        )
    ]
    assert attention_notes(found) == [
        "Attention on h100-1, h100-8: cudnn.",
        f"Attention on a100-80-1: xla, because {why}.",
    ]
    rows = as_json(found)["slices"]
    assert [row["attention"]["kernel"] for row in rows] == ["splash", "cudnn", "cudnn", "xla"]
    assert [row["attention"]["obstacle"] for row in rows] == [None, None, None, why]
    assert as_json([SMALL])["slices"][0]["attention"] is None, "a model without attention"
