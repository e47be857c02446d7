"""Print our prediction next to the published comparison of LoRA of Gemma 4 31B on a v5p-8 and on two H100.

python bench/tpu_against_gpu.py           # four compiles of minutes; needs the extras `plan` and `plan-gpu`
python bench/tpu_against_gpu.py --table   # only write the Markdown page again

The published ratios are from the abstract of arXiv 2605.25645. It gives no batch, no sequence length, no rank and no
prices, so the jobs here are assumptions. There are two of them, to show how much the ratio depends on the job.
"""

from __future__ import annotations

import json
import sys
import textwrap
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.hardware.slices import slice_named
from forerun.planner.cost.job_cost import Tariff
from forerun.planner.report.formatting import seconds_text
from forerun.units import GIB
from forerun.verbs.job_files import load_job
from forerun.verbs.plan import plan

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "tpu_against_gpu.json"
TPU, GPU = "v5p-8", "h100-2"
FASTER, CHEAPER = 1.61, 2.12  # published: the TPU against the GPUs
JOBS = {
    "8 x 2048 tokens": ("sequence=2048", "batch=8", "micro_batch=1"),
    "32 x 4096 tokens": ("sequence=4096", "batch=32", "micro_batch=1"),
}
# On the two GPUs the weights are split by tensor parallelism: with fsdp=2 the first job does not fit.
LAYOUTS = {TPU: (), GPU: ("mesh.fsdp=1", "mesh.tp=2")}


def usd_per_hour(name: str, providers: tuple[str, ...]) -> tuple[float, str]:
    """Return the lowest price of a slice or machine on demand, and its provider."""
    place = slice_named(name)
    price = Tariff(providers=providers).price_of(place)
    assert price is not None
    return price.usd_per_chip_hour_on_demand * place.chips, price.provider


def main() -> int:
    rows = []
    for words, overrides in JOBS.items():
        row: dict[str, Any] = {"job": words, "overrides": overrides}
        for name, layout in LAYOUTS.items():
            found = plan(load_job(HERE / "jobs" / "lora-gemma-4-31b.yaml", *overrides, *layout), on=[name])
            row[name] = kept(found.rows[0])
        rows.append(row)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("jax", "libtpu", "jax-cuda13-plugin")},
        "published": {"source": "arXiv 2605.25645", "faster": FASTER, "cheaper": CHEAPER},
        "usd_per_hour": {
            "gcp": {name: usd_per_hour(name, ("gcp",)) for name in (TPU, GPU)},
            "cheapest": {name: usd_per_hour(name, ()) for name in (TPU, GPU)},
        },
        "jobs": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    write_page(record)
    return 0


def kept(row: dict[str, Any]) -> dict[str, Any]:
    names = (
        "mesh",
        "fits",
        "hbm_peak_bytes",
        "hbm_limit_bytes",
        "step_seconds",
        "time_breakdown",
        "mfu",
        "limit",
        "uncertain",
    )
    return {name: row[name] for name in names}


def write_page(record: dict[str, Any]) -> None:
    """Write the ratios as Markdown, which docs/gpu.md includes, and print it."""
    prices = record["usd_per_hour"]
    hourly = {place: prices[place][GPU][0] / prices[place][TPU][0] for place in prices}
    lines = [
        f"| job | {TPU} | {GPU} | {TPU} is faster by | cheaper, gcp | cheaper, cheapest provider |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        f"| published | - | - | {FASTER} | {CHEAPER} | - |",
    ]
    for row in record["jobs"]:
        steps = {name: row[name]["step_seconds"] for name in (TPU, GPU)}
        if not all(steps.values()):
            lines.append(f"| {row['job']} | {' | '.join(fit_text(row[name]) for name in (TPU, GPU))} | - | - | - |")
            continue
        faster = steps[GPU]["mid"] / steps[TPU]["mid"]
        low, high = steps[GPU]["low"] / steps[TPU]["high"], steps[GPU]["high"] / steps[TPU]["low"]
        times = [f"{seconds_text(steps[name]['mid'])}, MFU {row[name]['mfu']:.0%}" for name in (TPU, GPU)]
        cheaper = [f"{faster * hourly[place]:.2f}" for place in ("gcp", "cheapest")]
        lines.append(
            f"| {row['job']} | {' | '.join(times)} | {faster:.2f} ({low:.2f} to {high:.2f}) | {' | '.join(cheaper)} |"
        )
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    offers = "; ".join(
        f"{place}: {TPU} ${prices[place][TPU][0]:.2f}, {GPU} ${prices[place][GPU][0]:.2f} ({prices[place][GPU][1]})"
        for place in prices
    )
    about = (
        f"`python bench/tpu_against_gpu.py`, {record['date']}, {versions}. Published: arXiv 2605.25645, abstract. The "
        "jobs are assumptions, because the abstract gives none: rank 16 on every matrix of the layers, full remat, one "
        "sequence at a time. The v5p-8 has fsdp=4, the GPUs have tp=2. The ranges combine those of both step times. "
        f"Prices per hour on demand of 2026-08: {offers}."
    )
    end = (
        f"The published ratios imply that two H100 cost {CHEAPER / FASTER:.2f} times as much per hour as a v5p-8. With "
        f"the list prices of Google Cloud it is {hourly['gcp']:.2f} times, and with the cheapest provider "
        f"{hourly['cheapest']:.2f} times."
    )
    middle = "\n".join(lines)
    text = f"{textwrap.fill(about, 120, break_on_hyphens=False)}\n\n{middle}\n\n{textwrap.fill(end, 120)}\n"
    RESULTS.with_suffix(".md").write_text(text)
    print(text)


def fit_text(row: dict[str, Any]) -> str:
    """Return whether a row fits, with its memory."""
    peak, limit = row["hbm_peak_bytes"] / GIB, row["hbm_limit_bytes"] / GIB
    return f"{'fits' if row['fits'] else 'does not fit'}: {peak:.1f} of {limit:.1f} GiB"


if __name__ == "__main__":
    if "--table" in sys.argv[1:]:
        write_page(json.loads(RESULTS.read_text()))
        sys.exit(0)
    sys.exit(main())
