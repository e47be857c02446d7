"""Two hosts and what was computed once, to be read in every step: `python tests/faults/runs_cached.py student|pairs`.

    student   learns from a teacher's words, which `forerun cache` wrote down
    pairs     preferences, with what the reference says of each pair. Each host keeps its own tokens; in the stop host 0
              loses half of what the reference said, and host 1 finds all of it

The run is stopped by a signal to one host and goes on. One host with two devices is the oracle: the same ledger, and
losses and validation losses within 1e-5. One JSON line.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import numpy as np
from runs import ROOT, TEXT, Bench, Run
from runs_hosts import STOPPED, TOLERANCE, HostsRun
from teacher_folder import write_teacher

from forerun.config.load import load
from forerun.resolve.resolve_model import resolve_model
from forerun.run.preference_reference import read_log_probs, write_log_probs
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics
from forerun.verbs.write_cache import write_cache

HOSTS, STEPS, EVERY, STOP_AT = 2, 24, 5, 6
JOB = """\
model: {{layers: 1, embed: 32, heads: 4}}
data: {{path: DATA, tokenizer: bytes, ledger: true, validation: 0.1}}
sequence: SEQUENCE
batch: 8
steps: {steps}
device: cpu
optimizer: {{lr: 3e-4}}
precision: {{compute: float32}}
checkpoint: {{every: {every}}}
validation: {{every: 8}}
sample: {{tokens: 0}}
"""
DISTIL = "distil: {{teacher: ./teacher, cache: words, top_k: 8, temperature: 2.0, soft: 0.7}}\n"
PREFERENCES = "preferences: dpo\n"
KEPT_BACK = {"train": 223, "validation": 17}  # of the example's 240 pairs


def bench_of(folder: Path, data: str, sequence: int, method: str) -> Bench:
    text = JOB.replace("DATA", data).replace("SEQUENCE", str(sequence)) + method
    return Bench(folder, steps=STEPS, every=EVERY, job=text)


def student(folder: Path) -> dict[str, Any]:
    bench = bench_of(folder, "lines.jsonl", 64, DISTIL)
    lines = TEXT.read_text()[:40_000].split("\n\n")
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines if line))
    write_teacher(folder / "teacher")
    with make_display(io.StringIO()) as display:
        write_cache(resolve_model(load(folder / "job.yaml", [f"data.store={folder / 'tokens'}"]).job), display)
    shutil.rmtree(folder / "teacher")  # its words are enough
    expected = one_host(bench)
    with HostsRun(bench, "hosts", HOSTS) as job:
        stop(job)
        assert job.start_all().wait() == [0] * HOSTS, job.said()
        return alike(job.run, expected)


def pairs(folder: Path) -> dict[str, Any]:
    bench = bench_of(folder, "pairs.jsonl", 160, PREFERENCES)
    shutil.copy(ROOT / "examples" / "dpo" / "pairs.jsonl", folder)
    expected = one_host(bench)
    with HostsRun(bench, "hosts", HOSTS, apart=True) as job:
        stop(job)
        lost = forget_half(job)
        assert job.start_all().wait() == [0] * HOSTS, job.said()
        return {**alike(job.run, expected), "computed_again": f"240 pairs, {lost} computed now" in job.said()}


def one_host(bench: Bench) -> Run:
    """Nothing happens to it; in this process, which starts sooner than another."""
    given = ["name=alone", f"devices={HOSTS}", f"runs={bench.folder / 'runs'}", f"data.store={bench.folder / 'tokens'}"]
    with make_display(io.StringIO()) as display:
        assert train(load(bench.folder / "job.yaml", given).job, display)
    return bench.run("alone")


def stop(job: HostsRun) -> None:
    """By a signal to host 1, not before step STOP_AT."""
    with job.run.bench.held_back(STOP_AT + 2, STEPS, step_seconds=2.0):
        job.start_all().until_step(STOP_AT)
        job.supervisors[1].terminate()
        assert job.wait() == [STOPPED] * HOSTS, job.said()
    assert STOP_AT <= job.run.last_step() < STEPS


def forget_half(job: HostsRun) -> int:
    """Host 1 gets all of what the reference said, and host 0 loses every other pair: how many."""
    lost = 0
    for file in job.cache(0).glob("forerun/tokens/**/reference/*.bin"):
        other = job.cache(1) / file.relative_to(job.cache(0))
        other.parent.mkdir(exist_ok=True)
        shutil.copy(file, other)
        said = read_log_probs(file, KEPT_BACK[file.name.partition("-")[0]])
        assert said is not None
        assert not np.isnan(said).any()
        said[::2] = np.nan
        write_log_probs(file, said)
        lost += len(said[::2])
    return lost


def alike(found: Run, expected: Run) -> dict[str, Any]:
    theirs, mine = figures(expected), figures(found)
    same = [*mine] == [*theirs] and len(mine) == STEPS + STEPS // 8
    worst = max(abs(mine[key] / theirs[key] - 1) for key in theirs) if same else None
    ledger = found.outcome().ledger == expected.outcome().ledger
    return {
        "ledger_equal": ledger,
        "loss_relative_difference": worst,
        "ok": ledger and worst is not None and worst <= TOLERANCE,
    }


def figures(run: Run) -> dict[tuple[int, str], float]:
    lines = read_metrics(run.folder / "metrics.jsonl")
    names = ("loss", "validation_loss")
    return {(line["step"], name): line[name] for line in lines for name in names if name in line}


def main(case: str) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        line = {"student": student, "pairs": pairs}[case](Path(folder) / "bench")
    print(json.dumps({"case": case, "hosts": HOSTS, **line, "seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
