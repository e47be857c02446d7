"""Plan every target job, one compile after the other, and record the compiler's results.

python bench/plan_targets.py        # a few minutes; needs libtpu (the `plan` extra), no TPU
python bench/plan_targets.py lora   # only jobs with this in their name; the other rows stay as they were
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forerun.config.load import load
from forerun.planner.compile.compiler import verdict
from forerun.planner.compile.request import CompileRequest, requests_of, slices_named
from forerun.planner.report.plan_json import as_json
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "plan_targets.json"


@dataclass(frozen=True)
class Target:
    """A job on a slice, with the required result: whether it fits, and optional limits.

    The limits are for the peak GiB per device, the predicted seconds of a step, and the tokens per second and chip.
    """

    job: str
    slice: str
    what: str
    overrides: tuple[str, ...] = ()
    fits: bool = True
    at_most_gib: float | None = None
    at_most_seconds: float | None = None
    at_least_tokens: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.job, self.slice, self.what

    def question(self) -> CompileRequest:
        job = load(HERE / "jobs" / f"{self.job}.yaml", self.overrides).job
        return requests_of(ResolvedJob(job), slices_named([self.slice]))[0]

    def met(self, row: dict[str, Any]) -> bool:
        below = self.at_most_gib is None or row["hbm_peak_bytes"] <= self.at_most_gib * GIB
        step = row["step_seconds"]["mid"] if row["fits"] else 0.0
        fast = self.at_most_seconds is None or step <= self.at_most_seconds
        chips = self.question().slice.chips
        rate = row["tokens_per_second"] / chips if row["fits"] else 0.0
        return below and fast and rate >= (self.at_least_tokens or 0.0) and row["fits"] == self.fits


TARGETS = (
    Target("qwen3-0.6b", "v6e-1", "4 x 1024 per chip, full remat", ("batch=4",)),
    Target("qwen3-0.6b", "v5e-8", "4 x 1024 per chip, full remat", at_most_gib=3.0),
    Target("llama3.1-8b", "v6e-8", "3 x 8192 per chip, full remat"),
    Target(
        "llama3.1-8b",
        "v6e-8",
        "3 x 8192 per chip, the remat that the search finds",
        ("remat={policy: named, keep: [attention_out], offload: [layer_in]}",),
        at_least_tokens=8700.0,
    ),
    Target("default-128b", "v5e-256", "1 x 2048 per chip, tp 16", at_most_seconds=15.2),
    Target("llama3.1-8b-1024-chips", "v5p-2048", "1,024 chips as 4 x 64 x 4"),
    Target("llama3.1-70b", "v6e-256", "2 x 8192 per chip, layer inputs in host memory"),
    Target("llama3.1-70b", "v6e-256", "2 x 8192 per chip, full remat: too large", ("remat=full",), fits=False),
    Target("lora-qwen3-0.6b", "v6e-1", "LoRA r=8, 4 x 1024, accumulation 8", at_most_gib=4.0),
    Target("lora-llama3.1-8b", "v5e-8", "LoRA r=16, 1 x 4096 per chip"),
    Target("qlora-llama3.1-8b", "v6e-1", "QLoRA (nf4) r=16, 1 x 4096"),
    Target("smollm2-135m", "v3-8", "2 x 1024 per device, XLA's own attention"),
)


def main(part: str = "") -> int:
    rows = []
    before = json.loads(RESULTS.read_text())["targets"] if part and RESULTS.exists() else []
    for target in TARGETS:
        if part not in target.job:
            rows += [row for row in before if (row["job"], row["slice"], row["what"]) == target.key]
            continue
        print(f"{target.job} on {target.slice}: {target.what}", file=sys.stderr, flush=True)
        row = as_json([verdict(target.question())])["slices"][0]
        rows.append({"job": target.job, "what": target.what, "overrides": target.overrides, **row})
        limits = {"at_most_gib": target.at_most_gib, "at_most_seconds": target.at_most_seconds}
        rows[-1] |= {**limits, "at_least_tokens": target.at_least_tokens, "met": target.met(row)}
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "libtpu")},
        "python": ".".join(map(str, sys.version_info[:3])),
        "targets": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    _print(record)
    return 0 if all(row["met"] for row in rows) else 1


def _print(record: dict[str, Any]) -> None:
    versions = record["versions"]
    table = Table(title=f"{record['date']}, jax {versions['jax']}, libtpu {versions['libtpu']}; GiB per device")
    for heading in ("job", "slice", "mesh", "what", "peak", "usable", "host", "fits", "s", "as wanted"):
        table.add_column(heading, no_wrap=heading != "what")
    for row in record["targets"]:
        sizes = (f"{row[key] / GIB:.2f}" for key in ("hbm_peak_bytes", "hbm_limit_bytes", "host_bytes"))
        words = ("yes" if row[key] else "no" for key in ("fits", "met"))
        fits, met = words
        seconds = f"{row['compile_seconds']:.1f}"
        table.add_row(row["job"], row["slice"], row["mesh"], row["what"], *sizes, fits, seconds, met)
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
