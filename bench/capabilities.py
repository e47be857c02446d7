"""Write the table of capabilities in docs/scale.md: the tests that prove equality, planned examples, published figures.

python bench/capabilities.py     # reads the results that the other commands of this folder have recorded; plans nothing
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.units import GIB

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "scale.md"
START, END = "<!-- capabilities: start -->\n", "<!-- capabilities: end -->\n"


@dataclass(frozen=True)
class Example:
    """A recorded plan: the file in `results`, the job, the slice and the overrides."""

    file: str
    job: str
    on: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capability:
    name: str
    page: str
    tests: tuple[str, ...]
    examples: tuple[Example, ...]
    published: str


KEEP = "remat={policy: named, keep: [attention_out], offload: [layer_in]}"
CAPABILITIES = (
    Capability(
        "small models without a loop",
        "#small-models-without-a-loop",
        ("tests/unit/program/test_unroll.py",),
        (
            Example("scale", "qwen3-0.6b", "v5e-8", ("remat=none", "unroll=auto")),
            Example("scale", "smollm2-135m", "v5e-1", ("remat=none", "unroll=true")),
        ),
        "none for these jobs",
    ),
)


def recorded(example: Example) -> dict[str, Any]:
    """Return the row of an example. A missing row is an error: the table must not lose a line."""
    data = json.loads((HERE / "results" / f"{example.file}.json").read_text("utf-8"))
    rows = data.get("rows", data.get("plans"))
    for row in rows.values() if isinstance(rows, dict) else rows:
        found = (row["job"], row["slice"], tuple(row.get("overrides", ())))
        if found == (example.job, example.on, example.overrides):
            return dict(row)
    raise LookupError(f"{example} is not in results/{example.file}.json")


def described(example: Example) -> str:
    """Return memory, step time and cost of 1,000 steps of a recorded plan."""
    row = recorded(example)
    words = " ".join(f"`{one}`" for one in example.overrides)
    start = f"{example.job} on {example.on}{f' ({words})' if words else ''}: "
    if not row["fits"]:
        return f"{start}does not fit"
    cost = 1000 / row["steps"] * row["cost_usd"]["on_demand"] if "steps" in row else row["cost_usd"]["on_demand"]
    return f"{start}{row['hbm_peak_bytes'] / GIB:.1f} GiB, {row['step_seconds']['mid']:.3g} s, ${cost:,.0f}"


def table() -> str:
    lines = [
        "| capability | tests | planned: memory per chip, step, cost of the job's steps | published |",
        "| --- | --- | --- | --- |",
    ]
    for one in CAPABILITIES:
        tests = "<br>".join(f"`{test}`" for test in one.tests)
        plans = "<br>".join(described(example) for example in one.examples)
        lines.append(f"| [{one.name}]({one.page}) | {tests} | {plans} | {one.published} |")
    return "\n".join(lines)


def main() -> int:
    for one in CAPABILITIES:
        for test in one.tests:
            if not (HERE.parent / test.partition("::")[0]).exists():
                raise FileNotFoundError(test)
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    _, mark, after = rest.partition(END)
    if not mark:
        raise LookupError(f"{PAGE} has no place for the table")
    PAGE.write_text(f"{before}{START}\n{table()}\n\n{END}{after}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
