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
    *rows_of("qwen3-30b-a3b", "v6e-32", "{fsdp: 4, expert: 8}", 4),
    Row("plans", "qwen3-30b-a3b", "v6e-8", ("micro_batch=1",)),
    *rows_of("lora-qwen3-30b-a3b", "v5e-64", "{fsdp: 8, expert: 8}", 1),
    *rows_of("lora-qwen3-30b-a3b", "v6e-32", "{fsdp: 4, expert: 8}", 2),
    *rows_of("lora-qwen3-30b-a3b", "v6e-8", "{fsdp: 1, expert: 8}", 1),
    Row("plans", "lora-qwen3-30b-a3b", "v6e-8", ("micro_batch=8",)),
    Row("plans", "qlora-qwen3-30b-a3b", "v6e-8", ("micro_batch=8",)),
    Row("plans", "qwen3.5-35b-a3b", "v5e-64", ("micro_batch=1", "mesh={fsdp: 8, expert: 8}")),
    Row("plans", "qwen3.5-35b-a3b", "v5e-64", ("micro_batch=1",)),
    Row("plans", "qwen3.5-35b-a3b", "v6e-32", ("micro_batch=4",)),
    Row("plans", "qwen3.5-35b-a3b", "v6e-32", ("micro_batch=1",)),
    Row("plans", "qwen3.5-35b-a3b", "v6e-8", ("micro_batch=1",)),
    Row("plans", "lora-qwen3.5-35b-a3b", "v5e-64", ("micro_batch=1", "mesh={fsdp: 8, expert: 8}")),
    Row("plans", "lora-qwen3.5-35b-a3b", "v6e-32", ("micro_batch=2",)),
    Row("plans", "lora-qwen3.5-35b-a3b", "v6e-8", ("micro_batch=1",)),
    Row("plans", "lora-qwen3.5-35b-a3b", "v6e-8", ("micro_batch=1", "mesh={fsdp: 1, expert: 8}")),
    Row("plans", "lora-qwen3.5-35b-a3b", "v6e-8", ("micro_batch=2",)),
    Row("plans", "lora-gpt-oss-20b", "v6e-8", ()),
    Row("plans", "gemma-4-26b-a4b", "v6e-32", ("micro_batch=1",)),
    Row("plans", "lora-gemma-4-26b-a4b", "v6e-8", ()),
    Row("plans", "lora-gemma-4-26b-a4b", "v6e-8", ("micro_batch=2",)),
)
TPU_RECIPES = "AI-Hypercomputer/tpu-recipes, Mixtral-8x7B-MaxText"
MAXTEXT = "AI-Hypercomputer/maxtext, Run_Mixtral.md"
MEASURED = {
    Row("published", "mixtral-8x7b", "v6e-256", ("micro_batch=4",)): Published(13.484, 0.329, 3645.0, TPU_RECIPES),
    Row("published", "mixtral-8x7b", "v5p-128", ("batch=2304", "micro_batch=12")): Published(
        None, 0.549, None, MAXTEXT
    ),
}
ROWS = (*PLANS, *MEASURED)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the planned rows as a Markdown table, with the parts of the step."""
    lines = [
        "| job | slice | mesh | micro-batch | peak GiB | step | tokens/s per chip | MFU | exposed | $ per 1,000 |",
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


def comparison(rows: dict[str, dict[str, Any]]) -> str:
    """Return the planned and the measured results of the same work as a Markdown table."""
    lines = [
        "| job | slice | overrides | result | peak GiB | step | tokens/s per chip | MFU |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for asked, known in MEASURED.items():
        row = rows.get(asked.key)
        if row is None:
            continue
        start = f"| {asked.job} | {asked.on} | `{' '.join(asked.overrides)}` "
        if row.get("hbm_peak_bytes") is None or not row["fits"]:
            peak = "-" if row.get("hbm_peak_bytes") is None else f"{row['hbm_peak_bytes'] / GIB:.2f}"
            lines.append(f"{start}| planned | {peak} | {row.get('error') or 'does not fit'} | - | - |")
        else:
            peak = f"{row['hbm_peak_bytes'] / GIB:.2f} of {row['hbm_limit_bytes'] / GIB:.2f}"
            rate = f"{row['tokens_per_second'] / row['chips']:,.0f}"
            lines.append(
                f"{start}| planned | {peak} | {row['step_seconds']['mid']:.2f} s | {rate} | {100 * row['mfu']:.1f} % |"
            )
        step = "-" if known.step_seconds is None else f"{known.step_seconds:.2f} s"
        rate = "-" if known.tokens_per_second_per_chip is None else f"{known.tokens_per_second_per_chip:,.0f}"
        share = "-" if known.mfu is None else f"{100 * known.mfu:.1f} %"
        lines.append(f"| | | | measured ({known.source}) | - | {step} | {rate} | {share} |")
    return "\n".join(lines)


def write_page(rows: dict[str, dict[str, Any]]) -> None:
    """Write the tables between their marks in the page."""
    text = PAGE.read_text("utf-8")
    plans = table([rows[one.key] for one in PLANS if one.key in rows])
    for part, made in (("plans", plans), ("published", comparison(rows))):
        start, end = f"<!-- experts {part}: start -->\n", f"<!-- experts {part}: end -->\n"
        before, _, rest = text.partition(start)
        _, mark, after = rest.partition(end)
        if mark:
            text = f"{before}{start}\n{made}\n\n{end}{after}"
    PAGE.write_text(text, "utf-8")


def main(words: list[str]) -> int:
    """Plan the chosen rows, write the results after each, and write the tables."""
    known: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"rows": {}}
    asked = set(words) - {"--missing"}
    for row in ROWS if words != ["--table"] else ():
        if not asked <= {row.part, row.job, row.on, *row.overrides} or (
            "--missing" in words and row.key in known["rows"]
        ):
            continue
        known["rows"][row.key] = found = planned(row)
        print(row.key, found.get("error") or (found["step_seconds"] or {}).get("mid"), flush=True)
        known["date"] = datetime.now(UTC).date().isoformat()
        known["versions"] = {name: version(name) for name in ("jax", "libtpu")}
        known["rows"] = {one.key: known["rows"][one.key] for one in ROWS if one.key in known["rows"]}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    write_page(known["rows"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
