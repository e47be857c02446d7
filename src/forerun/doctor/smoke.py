"""`forerun doctor --smoke`: a minute of real training on whatever is here, a line for each thing that must work."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.config.schema import Job
from forerun.errors import UserError

TRAIN_SECONDS = 20.0
STEPS_MOST = 400


@dataclass
class Bench:
    """What one line leaves for the next."""

    folder: Path
    made: dict[str, Any] = field(default_factory=dict)


def run() -> int:
    """0 if every line is ok, else 2."""
    with tempfile.TemporaryDirectory(prefix="forerun-smoke-") as name:
        bench = Bench(Path(name))
        for title, line in LINES:
            began = time.perf_counter()
            try:
                found = line(bench)
            except Exception as error:  # any failure at all is what this command is here to show
                why = error.what if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                print(f"FAIL  {title}: {why}")
                return UserError.exit_code
            print(f"ok    {title}: {found} ({time.perf_counter() - began:.1f} s)", flush=True)
    return 0


def smoke_job(folder: Path, devices: int) -> Job:
    return Job.model_validate(
        {
            "name": "smoke",
            "model": {"layers": 2, "embed": 128, "heads": 4},
            "data": str(folder / "text"),
            "sequence": 128,
            "batch": 8 * devices,
            "steps": STEPS_MOST,
            "optimizer": {"lr": 3e-3},
            "runs": str(folder / "runs"),
        }
    )


def _device(bench: Bench) -> str:
    from forerun.hardware.devices import choose

    bench.made["chosen"] = chosen = choose("auto", None)
    return f"{len(chosen.devices)} x {chosen.devices[0].device_kind}, {chosen.reason}"


def _data(bench: Bench) -> str:
    """Text that every Python brings along."""
    import pydoc_data.topics

    from forerun.loop.concrete import concrete
    from forerun.loop.corpus import open_corpus

    (bench.folder / "text").mkdir()
    (bench.folder / "text" / "topics.txt").write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    job = smoke_job(bench.folder, len(bench.made["chosen"].devices))
    corpus = open_corpus(job)
    bench.made.update(corpus=corpus, job=concrete(job, corpus))
    return corpus.lines()[0]


def _compiled_step(bench: Bench) -> str:

    from forerun.loop.placement import Placement
    from forerun.loop.train import batches_of, program_on

    job, corpus = bench.made["job"], bench.made["corpus"]
    program = program_on(job, bench.made["chosen"], corpus.rows.epoch)
    batches = batches_of(job, program, corpus)
    executable = program.trace().lower().compile(compiler_options=program.compiler_options or None)
    schedule = program.placed_schedule()

    def step(state: Any, batch: Any) -> Any:
        return executable(state, batch, schedule)

    def batch(number: int) -> Any:
        return Placement(program.batch)(batches.batch_at(number))

    state, metrics = step(program.initial_state(job.seed), batch(0))
    bench.made.update(program=program, step=step, batch=batch, state=state, first_loss=float(metrics.loss))
    return f"loss {float(metrics.loss):.3f} nats per byte"


def _gradients(bench: Bench) -> str:
    """The same batch on one device and on all: the gradient norms must agree."""

    from forerun.hardware.devices import Chosen
    from forerun.loop.placement import Placement
    from forerun.loop.train import batches_of, program_on

    job, chosen, corpus = bench.made["job"], bench.made["chosen"], bench.made["corpus"]
    if len(chosen.devices) == 1:
        return "one device, nothing to compare"
    alone = Chosen(chosen.platform, chosen.devices[:1], chosen.reason)
    norms = []
    for these in (alone, chosen):
        program = program_on(job, these, corpus.rows.epoch)
        batch = Placement(program.batch)(batches_of(job, program, corpus).batch_at(0))
        step = program.trace().lower().compile(compiler_options=program.compiler_options or None)
        norms.append(float(step(program.initial_state(job.seed), batch, program.placed_schedule())[1].grad_norm))
    apart = abs(norms[0] - norms[1]) / norms[0]
    if apart > 2e-2:  # bfloat16 sums in another order
        raise UserError(
            f"gradient norms differ by {apart:.2%}", why=f"{norms[0]} alone, {norms[1]} together", fix="report a bug"
        )
    return f"norm {norms[0]:.4f} on one device, {norms[1]:.4f} on {len(chosen.devices)}"


def _trains(bench: Bench) -> str:
    made = bench.made
    began, number, metrics = time.perf_counter(), 1, None
    while number < STEPS_MOST and (number < 5 or time.perf_counter() - began < TRAIN_SECONDS):
        made["state"], metrics = made["step"](made["state"], made["batch"](number))
        number += 1
    assert metrics is not None
    made["steps_done"] = number
    loss, tokens = float(metrics.loss), number * made["program"].derived.tokens_per_step
    if not loss < made["first_loss"]:
        raise UserError(f"loss did not fall: {made['first_loss']:.3f} -> {loss:.3f}", why="", fix="report a bug")
    speed = tokens / (time.perf_counter() - began)
    return f"{number} steps, loss {made['first_loss']:.3f} -> {loss:.3f}, {speed:,.0f} tokens/s"


def _saved(bench: Bench) -> str:
    import jax
    import numpy as np

    from forerun.checkpoint.store import Store

    made = bench.made
    with Store(bench.folder / "checkpoints", keep=1) as store:
        store.save(made["steps_done"], made["state"], {})
        store.wait()
        made["restored"] = store.restore(made["steps_done"], made["program"].state)
    pairs = zip(jax.tree.leaves(made["state"]), jax.tree.leaves(made["restored"]), strict=True)
    equal = all(np.array_equal(jax.device_get(a), jax.device_get(b)) for a, b in pairs)
    if not equal:
        raise UserError("what was read back is not what was saved", why="arrays differ", fix="check the disk")
    return f"step {made['steps_done']}, {len(jax.tree.leaves(made['state']))} arrays, equal bit for bit"


def _resumed(bench: Bench) -> str:
    """One more step from memory and from the checkpoint: the same loss, to the bit."""
    made = bench.made
    batch = made["batch"](made["steps_done"])
    losses = [float(made["step"](state, batch)[1].loss) for state in (made["state"], made["restored"])]
    if losses[0] != losses[1]:
        raise UserError("the resumed run differs", why=f"{losses[0]!r} and {losses[1]!r}", fix="report a bug")
    return f"loss {losses[0]:.6f} both from memory and from the checkpoint"


LINES: tuple[tuple[str, Callable[[Bench], str]], ...] = (
    ("device", _device),
    ("data", _data),
    ("one compiled step", _compiled_step),
    ("gradients equal across devices", _gradients),
    ("training", _trains),
    ("checkpoint saved and read back", _saved),
    ("resumed", _resumed),
)
