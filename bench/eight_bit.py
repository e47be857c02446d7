"""Loss of training with matmuls of 8 bits, against float32 and bfloat16.

    python bench/eight_bit.py              # all runs that have no results yet: about three minutes each
    python bench/eight_bit.py int8         # only runs of this format
    python bench/eight_bit.py --table      # only write the table and the picture again

A small Llama-like model learns the bytes of the quickstart's three novels from random weights, with a twentieth held
out. Runs of one seed have the same weights at the start and the same batches. Every product of 8 bits is computed on a
CPU as the TPU computes it: codes are multiplied exactly, in int32 for int8. Writes bench/results/eight_bit.json after
each run, and docs/assets/eight-bit.svg.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from forerun.config.load import load
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics

ROOT = Path(__file__).resolve().parent
NOVELS = ROOT.parent / "examples/quickstart/text"
RESULTS = ROOT / "results/eight_bit.json"
PAGE = ROOT.parent / "docs/how-to/eight-bit.md"
START, END = "<!-- eight bit loss: start -->\n", "<!-- eight bit loss: end -->\n"
PICTURE = ROOT.parent / "docs/assets/eight-bit.svg"
SEEDS = (0, 1, 2)
STEPS, LATE = 2000, 200  # the late loss is the mean of the last steps
MODEL = "{layers: 2, embed: 64, heads: 4, mlp: 192}"
FORMATS = {
    "float32": ("precision.compute=float32",),
    "bfloat16": ("precision.compute=bfloat16",),
    "int8": ("precision.compute=float32", "precision.matmul=int8"),
    "fp8": ("precision.compute=float32", "precision.matmul=fp8"),
}
EVERY = 20  # steps per point of the curves


def run(folder: Path, name: str, seed: int, display: Any) -> dict[str, Any]:
    """Train one run; return its losses."""
    began = time.perf_counter()
    changes = [f"name={name}-{seed}", f"seed={seed}", *FORMATS[name]]
    assert train(load(folder / "job.yaml", changes).job, display) is not None
    rows = read_metrics(folder / "runs" / f"{name}-{seed}" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert len(losses) == STEPS
    return {
        "format": name,
        "seed": seed,
        "last_loss": round(losses[-1], 5),
        "late_loss": round(statistics.mean(losses[-LATE:]), 5),
        "validation_loss": round(held_out[-1], 5),
        "curve": [round(statistics.mean(losses[n : n + EVERY]), 4) for n in range(0, STEPS, EVERY)],
        "seconds": round(time.perf_counter() - began),
        "load_average": os.getloadavg()[1],
    }


def write_inputs(folder: Path) -> None:
    """Write the paragraphs of the novels and the job."""
    texts = [file.read_text("utf-8") for file in sorted(NOVELS.glob("*.txt"))]
    paragraphs = [" ".join(part.split()) for text in texts for part in text.split("\n\n") if part.strip()]
    (folder / "novels.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in paragraphs), "utf-8")
    (folder / "job.yaml").write_text(
        f"model: {MODEL}\ndata: {{path: novels.jsonl, store: tokens, tokenizer: bytes, validation: 0.05}}\n"
        f"sequence: 64\nbatch: 8\nsteps: {STEPS}\ndevice: cpu\ndevices: 1\nremat: none\noptimizer: {{lr: 4e-3}}\n"
        f"sample: {{tokens: 0}}\ncheckpoint: {{every: {STEPS}}}\nruns: {folder / 'runs'}\n",
        "utf-8",
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table: means over the seeds, and differences to float32 of the same seed."""
    lines = [
        "| products | validation loss | late loss | late loss minus that of float32, by seed | mean and deviation |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    known = {(row["format"], row["seed"]): row for row in rows}
    for name in FORMATS:
        own = [row for row in rows if row["format"] == name]
        if not own:
            continue
        means = [statistics.mean(row[key] for row in own) for key in ("validation_loss", "late_loss")]
        differences = [row["late_loss"] - known["float32", row["seed"]]["late_loss"] for row in own]
        shown, spread = ", ".join(f"{one:+.4f}" for one in differences), "-"
        if name == "float32":
            late = [row["late_loss"] for row in own]
            shown = f"seeds: {min(late):.4f} to {max(late):.4f}"
        elif len(differences) > 1:
            spread = f"{statistics.mean(differences):+.4f} ± {statistics.stdev(differences):.4f}"
        lines.append(f"| {name} | {means[0]:.4f} | {means[1]:.4f} | {shown} | {spread} |")
    return lines


COLOURS = {"bfloat16": "#8c959f", "int8": "#0969da", "fp8": "#cf222e"}
WIDTH, HEIGHT, GAP, LIMIT = 220, 110, 46, 0.15  # of a panel, and the largest difference that it shows
SMOOTH = 5  # points of the curves in a mean


def picture(rows: list[dict[str, Any]]) -> str:
    """Return an SVG: for each seed, the differences of the training loss to float32 over the steps."""
    known = {(row["format"], row["seed"]): row["curve"] for row in rows}
    parts = []
    for panel, seed in enumerate(SEEDS):
        left = GAP + panel * (WIDTH + GAP)
        parts.append(
            f'<g transform="translate({left} 30)"><text y="-8">seed {seed}</text>'
            f'<path d="M0 0V{HEIGHT}H{WIDTH}" class="axis"/><path d="M0 {HEIGHT / 2:g}H{WIDTH}" class="zero"/>'
            f'<text x="-6" y="6" class="end">+{LIMIT}</text><text x="-6" y="{HEIGHT / 2 + 4:g}" class="end">0</text>'
            f'<text x="-6" y="{HEIGHT}" class="end">-{LIMIT}</text>'
            f'<text x="{WIDTH}" y="{HEIGHT + 16}" class="end">{STEPS} steps</text>'
        )
        for name, colour in COLOURS.items():
            if (name, seed) not in known or ("float32", seed) not in known:
                continue
            differences = [a - b for a, b in zip(known[name, seed], known["float32", seed], strict=True)]
            points = []
            for n in range(len(differences) - SMOOTH + 1):
                mean = statistics.mean(differences[n : n + SMOOTH])
                height = HEIGHT / 2 * (1 - max(-1.0, min(1.0, mean / LIMIT)))
                points.append(f"{(n + SMOOTH / 2) * WIDTH / len(differences):.4g},{height:.4g}")
            parts.append(f'<polyline points="{" ".join(points)}" style="stroke:{colour}"/>')
        parts.append("</g>")
    for number, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{GAP + 90 * number}" y="{HEIGHT + 72}" style="fill:{colour}">{name}</text>')
    style = (
        "text{font:12px sans-serif;fill:#6e7781}.end{text-anchor:end}.axis{fill:none;stroke:#8c959f}"
        ".zero{stroke:#8c959f;stroke-dasharray:3 3}polyline{fill:none;stroke-width:1.5}"
    )
    width, height = GAP + len(SEEDS) * (WIDTH + GAP), HEIGHT + 84
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Training loss minus that of float32, for three seeds"><style>{style}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main(words: list[str]) -> int:
    known: dict[str, Any] = {"runs": []}
    if RESULTS.exists():
        known = json.loads(RESULTS.read_text("utf-8"))
    done = {(row["format"], row["seed"]) for row in known["runs"]}
    wanted = [name for name in FORMATS if not words or name in words]
    todo = [(name, seed) for seed in SEEDS for name in wanted if (name, seed) not in done]
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as quiet, make_display(quiet) as display:
        write_inputs(Path(name))
        for form, seed in todo if words != ["--table"] else []:
            known["runs"].append(found := run(Path(name), form, seed, display))
            known |= {"model": MODEL, "steps": STEPS, "late": LATE, "curve_steps": EVERY, "jax": jax.__version__}
            RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
            print({key: value for key, value in found.items() if key != "curve"}, flush=True)
    shown = "\n".join(table(known["runs"]))
    print(shown)
    PICTURE.write_text(picture(known["runs"]), "utf-8")
    text = PAGE.read_text("utf-8")
    PAGE.write_text(f"{text.split(START)[0]}{START}\n{shown}\n\n{END}{text.split(END)[1]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
