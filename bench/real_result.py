"""Improvement of a real model by each method: stories15M on sentences of three novels, held-out loss, two seeds.

    python bench/real_result.py            # SFT, LoRA and distillation; writes results and picture
    python bench/real_result.py --only sft # one of them (distil needs sft's first seed)

Every sentence of the novels is split in two: the first half is the prompt, and the second half has loss. A twentieth of
the sentences, chosen by their hash, is held out. All figures are the held-out loss in nats per token of the second
halves. The teacher of the distillation is the SFT model of the first seed. Its student starts from the same model as
SFT, and is trained on the teacher's probabilities instead of the sentences' next tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from real_weights.folders import stories_folder  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "real_result.json"
PICTURE = ROOT / "docs" / "assets" / "methods.svg"
SEEDS = (0, 1)
STEPS, EVERY = 40, 5
JOB = f"""\
data: {{path: sentences.jsonl, validation: 0.05}}
device: cpu
sequence: 128
batch: 8
steps: {STEPS}
optimizer: {{schedule: linear, warmup: 3, weight_decay: 0.0}}
precision: {{compute: float32}}
remat: none
validation: {{every: {EVERY}, batches: 8}}
checkpoint: {{every: {STEPS}}}
sample: {{tokens: 0}}
"""
METHODS: dict[str, list[str]] = {
    "sft": ["optimizer.lr=3e-4"],
    "lora": ["optimizer.lr=3e-3", "lora.rank=16", "lora.alpha=32", "lora.base=float32"],
    "distil": ["optimizer.lr=3e-4", "distil.teacher=./teacher", "distil.cache=logits", "distil.top_k=64",
               "distil.soft=1.0"],
}  # fmt: skip
COLOURS = {"sft": "#2563eb", "lora": "#d97706", "distil": "#059669"}


def forerun(*words: str, cwd: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "forerun", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"forerun {' '.join(words)}\n{done.stdout}\n{done.stderr}")


def write_sentences(target: Path) -> None:
    """Write the example's conversations as prompts and completions."""
    with target.open("w") as out:
        for line in (ROOT / "examples/sft/dialogues.jsonl").read_text().splitlines():
            said = [message["content"] for message in json.loads(line)["messages"][1:]]
            for prompt, completion in zip(said[::2], said[1::2], strict=True):
                out.write(json.dumps({"prompt": prompt, "completion": f" {completion}"}) + "\n")


def validation_losses(folder: Path, run: str) -> list[tuple[int, float]]:
    """Return (step, held-out loss) of each validation of a run."""
    lines = map(json.loads, (folder / "runs" / run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]


def held_out(folder: Path, model: str, name: str) -> float:
    """Return the held-out loss of a model. It runs one step at a learning rate that changes nothing."""
    forerun("train", "job.yaml", f"model={model}", f"name={name}", "steps=1", "optimizer.lr=1e-30", cwd=folder)
    return validation_losses(folder, name)[-1][1]


def tried(folder: Path, method: str, seed: int) -> dict[str, Any]:
    name, words = f"{method}-{seed}", [*METHODS[method], f"seed={seed}"]
    began, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if method == "distil":
        if not (folder / "teacher").exists():
            forerun("export", "runs/sft-0", "--to", "teacher", cwd=folder)
        forerun("cache", "job.yaml", "model=./base", *words, cwd=folder)
    forerun("train", "job.yaml", "model=./base", f"name={name}", *words, cwd=folder)
    curve = validation_losses(folder, name)
    if method == "distil":  # its validation loss includes the soft loss, so it cannot be compared with the others
        forerun("export", f"runs/{name}", "--to", f"made-{name}", cwd=folder)
        final = held_out(folder, f"./made-{name}", f"look-{name}")
    else:
        final = curve[-1][1]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seed": seed, "held_out": round(final, 4), "curve": [[step, round(loss, 4)] for step, loss in curve],
            "seconds": round(time.time() - began, 1), "cpu_seconds": round(cpu, 1)}  # fmt: skip


def picture(results: dict[str, Any]) -> str:
    """Return the SVG of the held-out loss by step, with a line per seed."""
    width, height, left, bottom = 640, 320, 52, 36
    base = results["base"]
    series = {(method, one["seed"]): [[0, base], *one["curve"]] for method in METHODS if method != "distil"
              for one in results.get(method, [])}  # fmt: skip
    ends = {("distil", one["seed"]): one["held_out"] for one in results.get("distil", [])}
    values = [loss for curve in series.values() for _, loss in curve] + list(ends.values())
    low, high = min(values) - 0.05, max(values) + 0.05

    def x(step: float) -> float:
        return left + step / STEPS * (width - left - 110)

    def y(loss: float) -> float:
        return 14 + (high - loss) / (high - low) * (height - bottom - 14)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in range(6):
        loss = low + (high - low) * tick / 5
        parts.append(f'<line x1="{left}" x2="{x(STEPS)}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end" fill="#374151">{loss:.2f}</text>')
    for step in range(0, STEPS + 1, 10):
        parts.append(f'<text x="{x(step):.1f}" y="{height - 18}" text-anchor="middle" fill="#374151">{step}</text>')
    parts.append(f'<text x="{x(STEPS / 2):.1f}" y="{height - 3}" text-anchor="middle" fill="#374151">step</text>')
    for (method, _), curve in series.items():
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[method]}" stroke-width="2"/>')
    for (method, _), loss in ends.items():
        parts.append(f'<circle cx="{x(STEPS):.1f}" cy="{y(loss):.1f}" r="4" fill="{COLOURS[method]}"/>')
    for number, method in enumerate(METHODS):
        if results.get(method):
            loss = min(one["held_out"] for one in results[method])
            text = f"{method} {loss:.3f}"
            parts.append(f'<text x="{x(STEPS) + 10:.1f}" y="{30 + 18 * number}" fill="{COLOURS[method]}">{text}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--only", action="append", default=[], choices=list(METHODS))
    words.add_argument(
        "--folder", type=Path, default=ROOT / ".cache" / "real_result", help="folder of the runs, which are kept"
    )
    given = words.parse_args()
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text()) if given.only and RESULTS.exists() else {}
    write_sentences(folder / "sentences.jsonl")
    (folder / "job.yaml").write_text(JOB)
    if not (folder / "base").exists():
        (folder / "base").symlink_to(stories_folder())
    if "base" not in results:
        results["base"] = round(held_out(folder, "./base", "look-base"), 4)
        print(f"base: {results['base']}", flush=True)
    for method in given.only or METHODS:
        results[method] = []
        for seed in SEEDS:
            results[method].append(tried(folder, method, seed))
            print(f"{method} seed {seed}: {results[method][-1]['held_out']}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PICTURE.write_text(picture(results))


if __name__ == "__main__":
    main()
