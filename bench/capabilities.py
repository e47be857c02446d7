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
    dtype: str | None = None  # of the matmuls, if the file compares several


@dataclass(frozen=True)
class Capability:
    name: str
    page: str
    tests: tuple[str, ...]
    examples: tuple[Example, ...]
    published: str


KEEP = "remat={policy: named, keep: [attention_out], offload: [layer_in]}"
SHORT = ("sequence=2048", "batch=96", "micro_batch=12")
CAPABILITIES = (
    Capability(
        "small models without a loop",
        "#small-models-without-a-loop",
        ("tests/contract/test_equalities.py", "tests/unit/planner/compile/test_fit_result.py"),
        (
            Example("scale", "qwen3-0.6b", "v5e-8", ("remat=none", "unroll=auto")),
            Example("scale", "smollm2-135m", "v5e-1", ("remat=none", "unroll=auto")),
        ),
        "none found",
    ),
    Capability(
        "several slices",
        "explanation/slices.md",
        ("tests/unit/program/test_slices.py", "tests/faults/test_slices.py", "tests/aot/test_slices.py"),
        (
            Example("slices_plan", "llama3.1-8b-slices", "16xv5e-256"),
            Example("slices_plan", "llama3.1-70b-slices", "16xv6e-256"),
            Example("slices_plan", "llama3.1-405b", "16xv5p-512"),
        ),
        "one slice: 405B on 512 chips of v5p 131.5 s, 68.5 % MFU (MaxText); several slices: none found",
    ),
    Capability(
        "mixture of experts",
        "explanation/experts.md",
        (
            "tests/contract/test_families.py",
            "tests/contract/test_experts.py",
            "tests/contract/test_expert_adapters.py",
            "tests/contract/test_quantized_experts.py",
        ),
        (
            Example("experts_plan", "mixtral-8x7b", "v6e-256", ("micro_batch=4",)),
            Example("experts_plan", "qwen3-30b-a3b", "v6e-32", ("micro_batch=4",)),
            Example("experts_plan", "lora-qwen3-30b-a3b", "v6e-8", ("micro_batch=8",)),
            Example("experts_plan", "qlora-qwen3-30b-a3b", "v6e-8", ("micro_batch=8",)),
            Example("experts_plan", "lora-qwen3.5-35b-a3b", "v6e-32", ("micro_batch=2",)),
            Example("experts_plan", "lora-gpt-oss-20b", "v6e-8"),
            Example("experts_plan", "lora-gemma-4-26b-a4b", "v6e-8", ("micro_batch=2",)),
        ),
        "Mixtral 8x7B on v6e-256: 13.484 s with dropped tokens (MaxText)",
    ),
    Capability(
        "experts over an axis of the mesh",
        "explanation/experts.md#split-the-experts-over-devices",
        ("tests/unit/program/test_expert_axis.py", "tests/unit/run/test_expert_run.py"),
        (
            Example("experts_plan", "qwen3-30b-a3b", "v5e-64", ("micro_batch=1",)),
            Example("experts_plan", "qwen3-30b-a3b", "v5e-64", ("micro_batch=1", "mesh={fsdp: 8, expert: 8}")),
        ),
        "none found for this job",
    ),
    Capability(
        "long context",
        "how-to/long-context.md",
        ("tests/contract/test_context.py", "tests/unit/run/test_context_run.py", "tests/aot/test_context_program.py"),
        (
            Example("long_context", "llama3.1-8b-131k", "v6e-16"),
            Example("long_context", "llama3.1-8b-131k", "v5p-32"),
            Example("long_context", "llama3.1-8b-1m", "v5p-256"),
        ),
        "70B with 131,072 tokens on 256 devices of TPU7x: 34.02 s, 38.9 % MFU (MaxText)",
    ),
    Capability(
        "matmuls with 8 bits",
        "how-to/eight-bit.md",
        ("tests/unit/program/test_eight_bit_step.py", "tests/unit/nn/weights/test_eight_bit.py"),
        (
            Example("eight_bit_plan", "llama3.1-8b", "v6e-8", (KEEP,), "bfloat16"),
            Example("eight_bit_plan", "llama3.1-8b", "v6e-8", (KEEP,), "int8"),
            Example("eight_bit_plan", "llama3.1-8b", "v6e-8", (KEEP, *SHORT), "bfloat16"),
            Example("eight_bit_plan", "llama3.1-8b", "v6e-8", (KEEP, *SHORT), "int8"),
        ),
        "none found for int8 on v6e; fp8 on TPU7x: 70B 7.93 s instead of 12.2 s (MaxText)",
    ),
    Capability(
        "the best program per chip",
        "#the-best-program-per-chip",
        ("tests/unit/nn/test_rotation.py", "tests/unit/program/test_kernels.py"),
        (
            Example("best_program", "llama3.1-8b", "v6e-8", (KEEP,)),
            Example("best_program", "llama3.1-70b", "v6e-256"),
        ),
        "8B on v6e-8: 3.443 s, 45.0 % MFU; 70B on v6e-256 with 5 sequences per chip: 42.66 s, 50.4 % MFU (MaxText)",
    ),
)


def recorded(example: Example) -> dict[str, Any]:
    """Return the row of an example. A missing row is an error: the table must not lose a line."""
    data = json.loads((HERE / "results" / f"{example.file}.json").read_text("utf-8"))
    rows = data.get("rows", data.get("plans"))
    if example.dtype is not None:  # a comparison: the key has the slice and the overrides
        return dict(rows[" ".join((example.on, *example.overrides))][example.dtype])
    for row in rows.values() if isinstance(rows, dict) else rows:
        if (row["job"], row["slice"], tuple(row.get("overrides", ()))) == (example.job, example.on, example.overrides):
            return dict(row)
    raise LookupError(f"{example} is not in results/{example.file}.json")


def described(example: Example) -> str:
    """Return memory, step time and cost of 1,000 steps of a recorded plan."""
    row = recorded(example)
    words = [*example.overrides]
    if example.dtype == "int8":
        words.append("precision.matmul=int8")
    settings = f" (`{' '.join(words)}`)" if words else ""
    step, usd = row["step_seconds"]["mid"], row["cost_usd"]["on_demand"]
    seconds, dollars = f"{step:.{3 if step < 1 else 2}f} s", f"${usd:,.{0 if usd > 99 else 2}f}"
    return f"{example.job} on {example.on}{settings}: {row['hbm_peak_bytes'] / GIB:.1f} GiB, {seconds}, {dollars}"


def table() -> str:
    lines = [
        "| capability | tests of equality | planned: memory per chip, step, 1,000 steps on demand | published |",
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
