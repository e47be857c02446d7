"""Benefit of quantization-aware training: validation loss after rounding, with and without it.

    python bench/qat.py            # a few minutes on two idle cores

A small byte model is trained on the paragraphs of the quickstart's novels, with a twentieth held out. Three runs
continue from its checkpoint, for the same number of steps and on the same batches: in floats, rounded in every step,
and with a frozen rounded base and an adapter. The float model is also rounded at the end, which is the result without
QAT. There are two seeds. Writes bench/results/qat.json and prints the table of docs/how-to/qat.md.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.hardware.devices import choose
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run.run_devices import program_on
from forerun.run.train import train
from forerun.run.validation import Validation
from forerun.supervise.worker import silent_worker
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics
from forerun.trained_model.base_weights import read_file_weights
from forerun.verbs.export.export import export

ROOT = Path(__file__).resolve().parent
NOVELS = ROOT.parent / "examples/quickstart/text"
SEEDS = (0, 1)
FIRST, MORE = 1000, 100
MODEL = "{layers: 2, embed: 96, heads: 4, mlp: 256}"
SCHEMES = {
    "int4, per channel": {"weights": "int4", "group": None},
    "int4, groups of 32": {"weights": "int4", "group": 32},
    "int8, per channel": {"weights": "int8", "group": None},
}
WAYS = ("checkpoint", "checkpoint, rounded", "float", "float, rounded", "qat", "adapter")
ADAPTER = "lora={rank: 16, alpha: 32, base: float32}"


def main() -> None:
    began, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as quiet, make_display(quiet) as display:
        bench = Bench(Path(name), display)
        for row in (row for seed in SEEDS for row in bench.rows(seed)):
            rows.append(row)
            result = {
                "model": MODEL,
                "steps": {"checkpoint": FIRST, "then each way": MORE},
                "rows": rows,
                "seconds": round(time.perf_counter() - began),
                "load_average": os.getloadavg()[1],
                "jax": jax.__version__,
            }
            (ROOT / "results/qat.json").write_text(json.dumps(result, indent=2) + "\n")
            print(row, flush=True)
    print("\n".join(table(rows)))


class Bench:
    def __init__(self, folder: Path, display: Any) -> None:
        self.folder, self.display = folder, display
        texts = [file.read_text() for file in sorted(NOVELS.glob("*.txt"))]
        paragraphs = [" ".join(part.split()) for text in texts for part in text.split("\n\n") if part.strip()]
        lines = (json.dumps({"text": paragraph}) for paragraph in paragraphs)
        (folder / "novels.jsonl").write_text("\n".join(lines))
        (folder / "job.yaml").write_text(
            f"model: {MODEL}\ndata: {{path: novels.jsonl, store: tokens, tokenizer: bytes, validation: 0.05}}\n"
            "sequence: 96\nbatch: 32\ndevice: cpu\ndevices: 1\nprecision: {compute: float32}\nremat: none\n"
            f"sample: {{tokens: 0}}\ncheckpoint: {{every: 1000}}\nruns: {folder / 'runs'}\n"
        )

    def rows(self, seed: int) -> Iterator[dict[str, Any]]:
        before = self.trained(f"first-{seed}", seed, f"steps={FIRST}", "optimizer.lr=6e-3")
        base = self.exported(f"first-{seed}")
        further = (f"model={base}", f"steps={MORE}")
        in_floats = self.trained(f"float-{seed}", seed, *further, "optimizer.lr=2e-3")
        longer = self.exported(f"float-{seed}")
        for number, (name, scheme) in enumerate(SCHEMES.items()):
            qat = "qat=" + json.dumps(scheme)
            found = (
                before,
                self.initial_loss(seed, f"model={base}", qat),
                in_floats,
                self.initial_loss(seed, f"model={longer}", qat),
                self.trained(f"qat-{seed}-{number}", seed, *further, qat, "optimizer.lr=2e-3"),
                self.trained(f"adapter-{seed}-{number}", seed, *further, qat, ADAPTER, "optimizer.lr=6e-3"),
            )
            losses = {way: round(loss, 4) for way, loss in zip(WAYS, found, strict=True)}
            yield {"weights": name, "seed": seed, **losses}

    def trained(self, name: str, seed: int, *changes: str) -> float:
        """Train a run and return its last validation loss."""
        assert train(self.job(f"name={name}", f"seed={seed}", *changes), self.display) is not None
        rows = [row for row in read_metrics(self.folder / "runs" / name / "metrics.jsonl") if "validation_loss" in row]
        return float(rows[-1]["validation_loss"])

    def initial_loss(self, seed: int, *changes: str) -> float:
        """Return the validation loss before any step."""
        job = self.job("name=look", f"seed={seed}", "steps=1", *changes)
        resolved = resolve_model(job)
        corpus = open_corpus(resolved)
        resolved = resolved.with_data(corpus)
        job, program = resolved.job, program_on(resolved, choose("cpu", 1), corpus.rows.epoch)
        state = program.initial_state(job.seed, read_file_weights(resolved, program))
        look = Validation(resolved, program, corpus, self.display).evaluate(0, state, silent_worker())
        assert look is not None
        return look.loss

    def exported(self, name: str) -> Path:
        target = self.folder / f"{name}-model"
        return export(str(self.folder / "runs" / name), str(target), dtype="float32").folder

    def job(self, *changes: str) -> Job:
        return load(self.folder / "job.yaml", list(changes)).job


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table: means over the seeds, with the increase over floats in parentheses."""
    lines = ["| weights | " + " | ".join(WAYS) + " |", "| --- " * (1 + len(WAYS)) + "|"]
    for name in dict.fromkeys(row["weights"] for row in rows):
        mine = [row for row in rows if row["weights"] == name]
        mean = {way: sum(row[way] for row in mine) / len(mine) for way in WAYS}
        cells = [f"{mean[way]:.4f}" + _cost(way, mean) for way in WAYS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cost(way: str, mean: dict[str, float]) -> str:
    if way in ("checkpoint", "float"):
        return ""
    return f" ({mean[way] - mean['checkpoint' if way.startswith('checkpoint') else 'float']:+.4f})"


if __name__ == "__main__":
    main()
