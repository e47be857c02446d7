"""Published runs on GPUs that the step-time model is compared with, as forerun jobs, and their split into halves.

python bench/accuracy/gpu_runs.py    # writes gpu_split.csv and prints the hashes of the sealed files

Each run of gpu_published.csv was measured on real GPUs and published with its dimensions. The split is by family: a
recipe with all its sizes and machines. Within a generation of GPUs, families are ordered by sha256(name), and each goes
to the half that has fewer runs so far, calibration first. A family that a prototype of the model was tried on is never
held out. A run that is not comparable (column `unlike`) is in no half. gpu_split.csv has the half and the hash of the
job of every run. Both files were committed before the first prediction, and a test compares their hashes.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from runs import Run

from forerun.hardware.slices import slice_named

HERE = Path(__file__).resolve().parent
PUBLISHED, SPLIT = HERE / "gpu_published.csv", HERE / "gpu_split.csv"
GENERATIONS = {"a100": ("A100-40", "A100-80"), "hopper": ("H100", "H200"), "b200": ("B200",), "4090": ("4090",)}
HALVES = ("calibration", "held-out")
SEEN = ("maxtext/llama2-7b hopper",)
# For a program without recomputation that does not fit: all matmuls are kept except the output of the out projection.
ALL_KEPT = ("layer_in", "query", "key", "value", "attention_out", "mlp_gate", "mlp_up")


def _dims(
    layers: int, embed: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool = False, **more: bool
) -> dict[str, Any]:
    return {
        "layers": layers,
        "embed": embed,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": embed // heads,
        "mlp": mlp,
        "vocab": vocab,
        "tied": tied,
        **more,
    }


def _two_matrices(layers: int, embed: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool = True) -> Any:
    """Return a model whose gated MLP has the weights of two matrices of width `mlp`, up to a multiple of 64."""
    return _dims(layers, embed, heads, kv_heads, 64 * round(mlp * 2 / 3 / 64), vocab, tied)


MODELS: dict[str, dict[str, Any]] = {
    "llama2-7b": _dims(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _dims(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": _dims(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _dims(32, 4096, 32, 8, 14336, 128256),
    "llama3-15b": _dims(40, 5120, 40, 8, 17920, 128256),
    "llama3-70b": _dims(80, 8192, 64, 8, 28672, 128256),
    "llama3.2-3b": _dims(28, 3072, 24, 8, 8192, 128256, tied=True),
    "tinyllama-1.1b": _dims(22, 2048, 32, 4, 5632, 32000),
    "qwen2.5-0.5b": _dims(24, 896, 14, 2, 4864, 151936, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": _dims(28, 1536, 12, 2, 8960, 151936, tied=True, qkv_bias=True),
    "qwen2.5-7b": _dims(28, 3584, 28, 4, 18944, 152064, qkv_bias=True),
    "mpt-1b": _two_matrices(24, 2048, 16, 16, 8192, 50368),
    "mpt-3b": _two_matrices(32, 2560, 20, 20, 10240, 50368),
    "mpt-7b": _two_matrices(32, 4096, 32, 32, 16384, 50368),
    "mpt-13b": _two_matrices(40, 5120, 40, 40, 20480, 50368),
    "mpt-30b": _two_matrices(48, 7168, 56, 56, 28672, 50368),
    "mpt-70b": _two_matrices(80, 8192, 64, 64, 32768, 50368),
    "gpt2-350m": _two_matrices(24, 1024, 16, 16, 4096, 50304),
    "gpt2-774m": _two_matrices(36, 1280, 20, 20, 5120, 50304),
    "gpt2-1558m": _two_matrices(48, 1600, 25, 25, 6400, 50304),
    "gpt3-5b": _two_matrices(24, 4096, 32, 32, 16384, 50304),
    "nemotron4-15b": _two_matrices(32, 6144, 48, 8, 24576, 256000, tied=False),
}


def runs() -> list[Run]:
    with PUBLISHED.open() as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> Run:
    seconds, derived = _seconds(row)
    return Run(
        row["name"], row["family"], row["slice"], seconds, row["source"], _job(row), derived, row["note"], row["unlike"]
    )


def _seconds(row: dict[str, str]) -> tuple[float, str]:
    """Return the seconds per step, and how they follow from what was published."""
    published, tokens = float(row["published"]), int(row["batch"]) * int(row["sequence"])
    if row["unit"] == "seconds":
        return published, ""
    gpus = slice_named(row["slice"]).devices
    if row["unit"] == "tokens/s/GPU":
        return tokens / gpus / published, f"{tokens // gpus:,} tokens per GPU / {published:g} tokens/s"
    assert row["unit"] == "TFLOP/s/GPU", row
    flops = full_attention_flops(MODELS[row["model"]], int(row["sequence"]))
    return flops * tokens / gpus / published / 1e12, f"(6 N + 12 L H D S) x {tokens // gpus:,} / {published:g} TFLOP/s"


def full_attention_flops(model: dict[str, Any], sequence: int) -> float:
    """Return the FLOPs per token as MaxText counted before its pull request 1988.

    It counts 6 per weight, and attention over all positions, also those that the causal mask excludes.
    """
    width = model["heads"] * model["head_dim"]
    layer = model["embed"] * (2 * width + 2 * model["kv_heads"] * model["head_dim"] + 3 * model["mlp"])
    weights = model["layers"] * layer + model["vocab"] * model["embed"]
    return 6.0 * weights + 12.0 * model["layers"] * width * sequence


def _job(row: dict[str, str]) -> dict[str, Any]:
    kept = row["remat"].split()
    job: dict[str, Any] = {
        "model": MODELS[row["model"]],
        "sequence": int(row["sequence"]),
        "batch": int(row["batch"]),
        "micro_batch": int(row["micro_batch"]),
        "mesh": {axis: int(row[axis]) for axis in ("data", "fsdp", "tp")},
        "remat": {"policy": "named", "keep": kept} if len(kept) > 1 else row["remat"],
        "precision": {"params": row["params"]},
    }
    if row["lora_rank"]:
        job["lora"] = {"rank": int(row["lora_rank"])}
    return job


def variants(run: Run) -> list[Run]:
    """Return the run, and what is compiled instead if its program without recomputation does not fit."""
    if run.job["remat"] != "none":
        return [run]
    return [run, replace(run, job={**run.job, "remat": {"policy": "named", "keep": list(ALL_KEPT)}})]


def generation(run: Run) -> str:
    return next(name for name, chips in GENERATIONS.items() if run.generation in chips)


def halves(all_runs: list[Run]) -> dict[str, str]:
    """Return family -> calibration or held-out."""
    found: dict[str, str] = {}
    counted = [run for run in all_runs if not run.unlike]
    for name in GENERATIONS:
        sizes = Counter(run.family for run in counted if generation(run) == name)
        taken = dict.fromkeys(HALVES, 0)
        for family in sorted(sizes, key=lambda one: (one not in SEEN, _digest(one))):
            found[family] = min(HALVES, key=lambda half: taken[half])
            taken[found[family]] += sizes[family]
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def half(run: Run, half_of: dict[str, str]) -> str:
    return "not counted" if run.unlike else half_of[run.family]


def split_table(all_runs: list[Run]) -> str:
    """Return the content of gpu_split.csv: the half of each run, its seconds and the hash of its job."""
    half_of = halves(all_runs)
    lines = [
        f"{generation(run)},{run.family},{half(run, half_of)},{run.name},{run.seconds:.4f},"
        f"{_digest(json.dumps(run.job, sort_keys=True))[:16]}"
        for run in all_runs
    ]
    return "\n".join(["generation,family,half,run,seconds,job", *sorted(lines)]) + "\n"


def main() -> int:
    SPLIT.write_text(split_table(runs()))
    for path in (PUBLISHED, SPLIT):
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
