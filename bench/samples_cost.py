"""Cost of samples during training: the time of a step beside them, and the time of the samples themselves.

    python bench/samples_cost.py            # about 2 minutes on two idle cores

Runs with and without samples alternate in one process with the same compiled step, so that other load on the machine
affects both equally. As in metrics.jsonl, the time of a step does not include the samples. The ratio says whether they
change the speed of the steps between them. Writes bench/results/samples_cost.json.
"""

from __future__ import annotations

import io
import json
import statistics
import tempfile
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
from forerun.run.open_data import batches_of
from forerun.run.prepared_run import PreparedRun, ResumePoint, train_steps
from forerun.run.replicas import ReplicaCheck
from forerun.run.run_devices import program_on
from forerun.run.sample import sampler_of
from forerun.run.throughput import Throughput
from forerun.run.validation import Validation
from forerun.run_folder.run_folder import RunFolder
from forerun.run_folder.stored_files import saved_files
from forerun.supervise.worker import silent_worker
from forerun.track.display.make_display import make_display
from forerun.track.event_log import read_events
from forerun.track.run_times import RunTimes

ROOT = Path(__file__).parent
ROUNDS, STEPS, EVERY, TOKENS = 6, 20, 5, 64
JOB = {
    "model": {"layers": 4, "embed": 64, "heads": 4},
    "data": str(ROOT.parent / "examples/quickstart/text"),
    "sequence": 128,
    "batch": 8,
    "steps": STEPS,
    "precision": {"compute": "float32"},
    "remat": "none",
    "checkpoint": {"every": 10**9},
    "sample": {"every": EVERY, "tokens": TOKENS, "prompts": ["Alice ", "The Queen "]},
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
    sampler = sampler_of(resolved, program, corpus.tokenizer)
    assert sampler is not None
    times = RunTimes()
    with times.spent("compile"):
        sampler.compile(program.initial_state(0))
    compile_seconds = times._seconds["compile"]

    def run(with_samples: bool) -> tuple[float, float]:
        """Return the median seconds of a step, and the seconds of all samples."""
        state = program.initial_state(0)
        jax.block_until_ready(state)
        with tempfile.TemporaryDirectory() as name:
            folder, times = RunFolder(Path(name)), RunTimes()
            times.open(folder.events)
            with CheckpointStore(folder.path / "checkpoints", keep=1) as store:
                store.save = lambda *_: None  # type: ignore[method-assign]
                prepared = PreparedRun(
                    session=RunSession(resolved, display, silent_worker(), times),
                    devices=devices,
                    corpus=corpus,
                    program=program,
                    compiled_step=step,
                    batches=batches,
                    folder=folder,
                    replica_check=ReplicaCheck(program, None),
                    validation=Validation(resolved, program, corpus, display),
                    sampler=sampler if with_samples else None,
                )
                saved, throughput = saved_files(store, 0), Throughput(program, 0, None)
                resume = ResumePoint(saved, guard_of(resolved, folder, saved, display), None, {}, None)
                train_steps(prepared, resume, state, throughput, store)
                times.end(STEPS)
                times.close()
            timed = [event for event in read_events(folder.events) if event["event"] == "time"]
            return statistics.median(throughput.step_seconds[1:]), timed[-1]["seconds"].get("samples", 0.0)

    run(False), run(True)  # warm
    pairs = [(run(False), run(True)) for _ in range(ROUNDS)]
    ratios = sorted(beside / without for (without, _), (beside, _) in pairs)
    events = STEPS // EVERY
    result = {
        "step_seconds_without": statistics.median(without for (without, _), _ in pairs),
        "step_seconds_with": statistics.median(beside for _, (beside, _) in pairs),
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-len(ratios) // 4]],
        "seconds_per_event": statistics.median(samples / events for _, (_, samples) in pairs),
        "compile_seconds": compile_seconds,
        "prompts": len(job.sample.texts),
        "tokens_per_prompt": TOKENS,
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "jax": jax.__version__,
    }
    print(json.dumps(result, indent=2))
    (ROOT / "results").mkdir(exist_ok=True)
    (ROOT / "results/samples_cost.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
