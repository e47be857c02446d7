"""Overhead of the training loop: `train`'s wall time per step relative to the bare compiled step, fed from memory.

    python bench/loop_overhead.py            # about 4 minutes on two idle cores

Both run the same compiled program in one process, alternately (bare, loop, bare, loop, ...), so that other load on the
machine affects both equally. The loop is the real one: data, prefetch thread, placement, guards, metrics file, and the
display without a terminal. Checkpoints are excluded, because their cost depends on the disk and on their interval.
Writes bench/results/loop_overhead.json.
"""

from __future__ import annotations

import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax

from forerun.checkpoint.store import CheckpointStore
from forerun.config.schema import Job
from forerun.hardware.devices import choose
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run.compile_step import compile_step
from forerun.run.guard import guard_of
from forerun.run.hooks import RunSession
from forerun.run.open_data import Placement, batches_of
from forerun.run.prepared_run import PreparedRun, ResumePoint, train_steps
from forerun.run.replicas import ReplicaCheck
from forerun.run.run_devices import program_on
from forerun.run.throughput import Throughput
from forerun.run.validation import Validation
from forerun.run_folder.run_folder import RunFolder
from forerun.run_folder.stored_files import saved_files
from forerun.supervise.worker import silent_worker
from forerun.track.display.make_display import make_display

ROOT = Path(__file__).parent
ROUNDS, STEPS = 12, 30
JOB = {
    "model": {"layers": 4, "embed": 64, "heads": 4},
    "data": str(ROOT.parent / "examples/quickstart/text"),
    "sequence": 128,
    "batch": 8,
    "steps": STEPS,
    "precision": {"compute": "float32"},
    "remat": "none",
    "checkpoint": {"every": 10**9},
}


def main() -> None:
    job = Job.model_validate(JOB)
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    devices = choose("cpu", None)
    job, program = resolved.job, program_on(resolved, devices, len(corpus.rows))
    batches = batches_of(resolved, program, corpus)
    display = make_display(io.StringIO())
    step = compile_step(program, display)
    schedule = program.placed_schedule()
    memory = [Placement(program.batch)(batches.batch_at(number)) for number in range(STEPS)]

    def bare() -> float:
        state = program.initial_state(0)
        jax.block_until_ready(state)
        began = time.perf_counter()
        for batch in memory:
            state, metrics = step._run(state, batch, schedule)
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - began) / STEPS

    def loop() -> float:
        state = program.initial_state(0)
        jax.block_until_ready(state)
        with tempfile.TemporaryDirectory() as name:
            folder = RunFolder(Path(name))
            with CheckpointStore(folder.path / "checkpoints", keep=1) as store:
                store.save = lambda *_: None  # type: ignore[method-assign]
                began = time.perf_counter()
                prepared = PreparedRun(
                    session=RunSession(resolved, display, silent_worker()),
                    devices=devices,
                    corpus=corpus,
                    program=program,
                    compiled_step=step,
                    batches=batches,
                    folder=folder,
                    replica_check=ReplicaCheck(program, None),
                    validation=Validation(resolved, program, corpus, display),
                )
                saved, throughput = saved_files(store, 0), Throughput(program, 0, None)
                resume = ResumePoint(saved, guard_of(resolved, folder, saved, display), None, {}, None)
                final = train_steps(prepared, resume, state, throughput, store)
                jax.block_until_ready(final)
                return (time.perf_counter() - began) / STEPS

    bare(), loop()  # warm
    pairs = [(bare(), loop()) for _ in range(ROUNDS)]
    ratios = sorted(inside / alone for alone, inside in pairs)
    result = {
        "bare_step_seconds": statistics.median(alone for alone, _ in pairs),
        "loop_step_seconds": statistics.median(inside for _, inside in pairs),
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-len(ratios) // 4]],
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "jax": jax.__version__,
    }
    print(json.dumps(result, indent=2))
    (ROOT / "results").mkdir(exist_ok=True)
    (ROOT / "results/loop_overhead.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
