"""What the training loop costs: `train`'s wall time per step over the bare compiled step fed from memory.

    python bench/loop_overhead.py            # about 4 minutes on two idle cores

Both run the same compiled program in one process, in turns (bare, loop, bare, loop, ...), so that a noisy
machine hurts both alike. The loop is the real one: data, prefetch thread, placing, guards, metrics file,
display off a terminal. Checkpoints are left out: their cost depends on the disk and on how often.
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

from forerun.checkpoint.store import Store
from forerun.config.schema import Job
from forerun.hardware.devices import choose
from forerun.loop.compilation import compile_step
from forerun.loop.concrete import concrete, open_corpus
from forerun.loop.copies import Copies
from forerun.loop.folder import RunFolder
from forerun.loop.guard import guard_of
from forerun.loop.pace import Pace
from forerun.loop.placement import Placement
from forerun.loop.steps import Steps, run_steps
from forerun.loop.train import batches_of, program_on
from forerun.loop.validation import Validation
from forerun.supervise.worker import unattended
from forerun.track.display import make_display

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
    corpus = open_corpus(job)
    job = concrete(job, corpus)
    program = program_on(job, choose("cpu", None), len(corpus.rows))
    batches = batches_of(job, program, corpus)
    display = make_display(io.StringIO())
    step = compile_step(program, display)
    memory = [Placement(program.batch)(batches.batch_at(number)) for number in range(STEPS)]

    def bare() -> float:
        state = program.initial_state(0)
        jax.block_until_ready(state)
        began = time.perf_counter()
        for batch in memory:
            state, metrics = step._run(state, batch)
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - began) / STEPS

    def loop() -> float:
        state = program.initial_state(0)
        jax.block_until_ready(state)
        with tempfile.TemporaryDirectory() as name:
            folder = RunFolder(Path(name))
            with Store(folder.path / "checkpoints", keep=1) as store:
                store.save = lambda *_: None  # type: ignore[method-assign]
                began = time.perf_counter()
                pace, worker = Pace(program, 0, None), unattended()
                guard, copies = guard_of(job, folder), Copies(program, None)
                steps = Steps(
                    job=job,
                    program=program,
                    step=step,
                    batches=batches,
                    pace=pace,
                    guard=guard,
                    copies=copies,
                    validation=Validation(job, program, corpus, display),
                    store=store,
                    record={},
                    folder=folder,
                    display=display,
                    worker=worker,
                )
                jax.block_until_ready(run_steps(steps, state))
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
