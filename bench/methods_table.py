"""Peak HBM and trained parameters of every method at the size of Qwen3-0.6B, from the TPU compiler on two slices.

    python bench/methods_table.py              # writes bench/results/methods.json; some minutes
    python bench/methods_table.py --only lora

All methods use 32 sequences of 1024 tokens per step, four at a time on a device.
tests/contract/test_methods_table.py writes the table in docs/reference/methods.md from the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from recipes import forerun  # noqa: E402

from forerun.config.load import load  # noqa: E402
from forerun.config.recipes import RECIPES, written  # noqa: E402
from forerun.resolve.resolved_job import ResolvedJob  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "methods.json"
WORDS = ["model=qwen3-0.6b", "sequence=1024", "batch=32", "micro_batch=4", "steps=500"]
METHODS = {
    "pretrain": ("pretrain", []),
    "sft": ("sft", []),
    "lora": ("lora", ["lora.rank=8"]),
    "dora": ("lora", ["lora.rank=8", "lora.dora=true"]),
    "qlora": ("qlora", ["lora.rank=8"]),
    "distil": ("distil", ["distil.teacher=qwen3-1.7b"]),
    "distil online": ("distil", ["distil.teacher=qwen3-1.7b", "distil.cache=null"]),
    "qat": ("qat", []),
    "qat + lora": ("qat", ["lora.rank=32", "lora.alpha=32"]),
    "dpo": ("dpo", ["lora=null"]),
    "dpo + lora": ("dpo", ["lora.rank=8"]),
    "muon": ("pretrain", ["optimizer.name=muon"]),
    "adafactor": ("pretrain", ["optimizer.name=adafactor"]),
    "lion": ("pretrain", ["optimizer.name=lion"]),
    "adamw8bit": ("pretrain", ["optimizer.name=adamw8bit"]),
}


def measured(recipe: str, words: list[str], folder: Path) -> dict[str, Any]:
    from forerun.program.state import resting

    job = folder / f"{recipe}.yaml"
    if not job.exists():
        written(RECIPES[recipe], job)
    told = forerun("plan", job.name, *WORDS, *words, "--on", "v6e-1,v5e-8", "--json", cwd=folder)
    peaks = {one["slice"]: round(one["hbm_peak_bytes"] / 2**30, 2) for one in json.loads(told)["slices"]}
    made = load(job, [*WORDS, *words]).job
    return {"peak_gib": peaks, "trainable_parameters": resting(ResolvedJob(made)).gradient_bytes // 4}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--only", action="append", default=[], choices=list(METHODS))
    given = words.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as work:
        for name in given.only or METHODS:
            results[name] = measured(*METHODS[name], Path(work))
            print(name, results[name], flush=True)
            RESULTS.write_text(json.dumps({key: results[key] for key in METHODS if key in results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
