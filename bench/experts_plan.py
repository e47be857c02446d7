"""Plan models with experts, with FSDP alone and with the expert axis, and record memory, step time and cost.

python bench/experts_plan.py                          # all rows, minutes each; needs libtpu, no TPU
python bench/experts_plan.py lora-qwen3-30b-a3b       # only rows of this job; a slice may follow. The other rows stay
python bench/experts_plan.py --missing                # only rows without a recorded plan
python bench/experts_plan.py --table                  # only write the tables of docs/explanation/experts.md again

Rows of the part `published` have the batch of a run on TPUs that others measured, and its result.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scale import Row, planned

from forerun.units import GIB

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "experts_plan.json"
PAGE = HERE.parent / "docs" / "explanation" / "experts.md"


@dataclass(frozen=True)
class Published:
    """The measured result of a run on TPUs, with its source. A value that the source lacks is None."""

    step_seconds: float | None
    mfu: float | None
    tokens_per_second_per_chip: float | None
    source: str


def rows_of(job: str, on: str, expert_mesh: str, *micro_batches: int) -> tuple[Row, ...]:
    """Return rows with FSDP alone and with the expert axis, for each micro-batch."""
    return tuple(
        Row("plans", job, on, (f"micro_batch={size}", *mesh))
        for size in micro_batches
        for mesh in ((), (f"mesh={expert_mesh}",))
    )


PLANS = (
    *rows_of("qwen3-30b-a3b", "v5e-64", "{fsdp: 8, expert: 8}", 1),
    *rows_of("qwen3-30b-a3b", "v6e-32", "{fsdp: 4, expert: 8}", 2),
    *rows_of("qwen3-30b-a3b", "v6e-8", "{fsdp: 1, expert: 8}", 1),
    *rows_of("lora-qwen3-30b-a3b", "v5e-64", "{fsdp: 8, expert: 8}", 1),
    *rows_of("lora-qwen3-30b-a3b", "v6e-32", "{fsdp: 4, expert: 8}", 2),
    *rows_of("lora-qwen3-30b-a3b", "v6e-8", "{fsdp: 1, expert: 8}", 1, 4),
    *rows_of("qlora-qwen3-30b-a3b", "v6e-8", "{fsdp: 1, expert: 8}", 4),
)
MEASURED = {
    Row("published", "mixtral-8x7b", "v6e-256", ()): Published(13.484, 0.329, 3645.203, "tpu-recipes, Mixtral-8x7B"),
}
ROWS = (*PLANS, *MEASURED)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the planned rows as a Markdown table, with the parts of the step."""
    lines = [
        "| job | slice | mesh | micro-batch | peak GiB | step | tokens/s per chip | MFU | exposed | $ for 1,000 steps |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        size = next((one.partition("=")[2] for one in row["overrides"] if one.startswith("micro_batch")), "1")
        start = f"| {row['job']} | {row['slice']} | {row.get('mesh') or '-'} | {size} "
        if row.get("hbm_peak_bytes") is None:
            lines.append(f"{start}| - | {row['error']} | - | - | - | - |")
            continue
        peak = f"| {row['hbm_peak_bytes'] / GIB:.2f} of {row['hbm_limit_bytes'] / GIB:.2f} "
        if not row["fits"]:
            lines.append(f"{start}{peak}| does not fit | - | - | - | - |")
            continue
        dollars = (row["cost_usd"] or {}).get("on_demand")
        lines.append(
            f"{start}{peak}| {row['step_seconds']['mid']:.2f} s | {row['tokens_per_second'] / row['chips']:,.0f} "
            f"| {100 * row['mfu']:.0f} % | {row['time_breakdown'].get('collectives_not_hidden', 0.0):.2f} s "
            f"| {'-' if dollars is None else f'{dollars:,.0f}'} |"
        )
    return "\n".join(lines)
