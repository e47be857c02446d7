"""The command `forerun doctor --smoke`: about a minute of real training, with one line per test."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.errors import UserError

TRAIN_SECONDS = 20.0
SECONDS_VARIABLE = "FORERUN_SMOKE_SECONDS"  # replaces TRAIN_SECONDS: a rented machine is billed while it is tested
STEPS_MOST = 400
KEYS = ("device", "devices", "mesh")  # of the job, which the user may change


@dataclass
class Bench:
    """The folder of the tests, the user's values of `KEYS`, and objects (`made`) that one test passes to the next."""

    folder: Path
    values: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)


def run(values: dict[str, Any] | None = None) -> int:
    """Run the tests until one fails, and print a line for each. Return 0 if all pass, else 2.

    Args:
      values: keys of `KEYS` with the values to use, from `values_of`.
    """
    with tempfile.TemporaryDirectory(prefix="forerun-smoke-") as name:
        bench = Bench(Path(name), values or {})
        for title, line in LINES:
            began = time.perf_counter()
            try:
                found = line(bench)
            except Exception as error:  # this command exists to report any failure
                print("\n".join((f"FAIL  {title}: {_reason(error)}", *_remedies(error))))
                return UserError.exit_code
            print(f"ok    {title}: {found} ({time.perf_counter() - began:.1f} s)", flush=True)
    return 0


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values that overrides such as `device=tpu` set.

    Raises:
      UserError: an override is malformed, or changes a key that is not in `KEYS`.
    """
    for override in overrides:
        if override.partition("=")[0].partition(".")[0] not in KEYS:
            raise UserError(
                "E-COMMAND-061",
                f"doctor --smoke cannot change '{override.partition('=')[0]}'",
                why=f"it trains its own small job; the keys that can be changed are {', '.join(KEYS)}",
                fix="write for example: forerun doctor --smoke device=tpu",
            )
    with tempfile.TemporaryDirectory(prefix="forerun-smoke-") as name:
        file = Path(name) / "smoke.yaml"
        file.write_text("model: {layers: 1, embed: 16, heads: 1}\ndata: text\nsteps: 1\n", encoding="utf-8")
        job = load(file, overrides).job
    return {key: getattr(job, key) for key in KEYS}


def _reason(error: Exception) -> str:
    return error.what if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _remedies(error: Exception) -> list[str]:
    """Return the cause and the fix of a UserError, indented below its line."""
    if not isinstance(error, UserError):
        return []
    parts = [f"{name}: {text}" for name, text in (("why", error.why), ("fix", error.fix)) if text]
    return [f"      {line}" for part in parts for line in part.splitlines()]


def smoke_job(folder: Path, devices: int) -> Job:
    """Return a job with a small model, whose batch divides over all devices."""
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
    """Choose the devices."""
    from forerun.hardware.devices import choose

    bench.made["chosen"] = chosen = choose(bench.values.get("device", "auto"), bench.values.get("devices"))
    return f"{len(chosen.devices)} x {chosen.devices[0].device_kind}, {chosen.reason}"


def _prepare_data(bench: Bench) -> str:
    """Prepare training data from the help texts that are part of every Python installation."""
    import pydoc_data.topics

    from forerun.resolve.job_corpus import open_corpus
    from forerun.resolve.resolve_model import resolve_model

    (bench.folder / "text").mkdir()
    (bench.folder / "text" / "topics.txt").write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    job = smoke_job(bench.folder, len(bench.made["chosen"].devices))
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    bench.made.update(corpus=corpus, one_device_job=resolved, job=resolved.with_values(**bench.values))
    return corpus.lines()[0]


def _compiled_step(bench: Bench) -> str:
    """Compile the training step and run it once."""
    from forerun.program.compiler_options import compile_lowered
    from forerun.run.open_data import Placement, batches_of
    from forerun.run.run_devices import program_on

    resolved, corpus = bench.made["job"], bench.made["corpus"]
    job = resolved.job
    program = program_on(resolved, bench.made["chosen"], corpus.rows.epoch)
    batches = batches_of(resolved, program, corpus)
    executable = compile_lowered(program.trace().lower(), program.compiler_options)
    schedule = program.placed_schedule()

    def step(state: Any, batch: Any) -> Any:
        return executable(state, batch, schedule)

    def batch(number: int) -> Any:
        return Placement(program.batch)(batches.batch_at(number))

    state, metrics = step(program.initial_state(job.seed), batch(0))
    bench.made.update(program=program, step=step, batch=batch, state=state, first_loss=float(metrics.loss))
    return f"loss {float(metrics.loss):.3f} nats per byte"


def _gradients(bench: Bench) -> str:
    """Compare the gradient norms of the same batch on one device and on all devices."""
    from forerun.hardware.devices import DeviceChoice
    from forerun.program.compiler_options import compile_lowered
    from forerun.run.open_data import Placement, batches_of
    from forerun.run.run_devices import program_on

    chosen, corpus = bench.made["chosen"], bench.made["corpus"]
    if len(chosen.devices) == 1:
        return "one device, nothing to compare"
    alone = DeviceChoice(chosen.platform, chosen.devices[:1], chosen.reason)
    norms = []
    # The job for one device has the default mesh: the user's mesh is for all devices.
    for these, resolved in ((alone, bench.made["one_device_job"]), (chosen, bench.made["job"])):
        job = resolved.job
        program = program_on(resolved, these, corpus.rows.epoch)
        batch = Placement(program.batch)(batches_of(resolved, program, corpus).batch_at(0))
        step = compile_lowered(program.trace().lower(), program.compiler_options)
        norms.append(float(step(program.initial_state(job.seed), batch, program.placed_schedule())[1].grad_norm))
    apart = abs(norms[0] - norms[1]) / norms[0]
    if apart > 2e-2:  # smaller differences come from bfloat16 sums in another order
        raise UserError(
            "E-DOCTOR-001",
            f"gradient norms differ by {apart:.2%}",
            why=f"{norms[0]} alone, {norms[1]} together",
            fix="report a bug",
        )
    return f"norm {norms[0]:.4f} on one device, {norms[1]:.4f} on {len(chosen.devices)}"


def _train(bench: Bench) -> str:
    """Train for TRAIN_SECONDS or STEPS_MOST steps, and check that the loss falls."""
    made, seconds = bench.made, float(os.environ.get(SECONDS_VARIABLE) or TRAIN_SECONDS)
    began, number, metrics = time.perf_counter(), 1, None
    while number < STEPS_MOST and (number < 5 or time.perf_counter() - began < seconds):
        made["state"], metrics = made["step"](made["state"], made["batch"](number))
        metrics.loss.block_until_ready()  # steps that are only dispatched would be waited for after the limit
        number += 1
    assert metrics is not None
    made["steps_done"] = number
    loss, tokens = float(metrics.loss), number * made["program"].derived.tokens_per_step
    if not loss < made["first_loss"]:
        raise UserError(
            "E-DOCTOR-002",
            f"loss did not fall: {made['first_loss']:.3f} -> {loss:.3f}",
            why=f"{number} steps on simple text lower the loss if the devices compute correctly",
            fix="report a bug",
        )
    speed = tokens / (time.perf_counter() - began)
    return f"{number} steps, loss {made['first_loss']:.3f} -> {loss:.3f}, {speed:,.0f} tokens/s"


def _save_and_restore(bench: Bench) -> str:
    """Save a checkpoint, read it back, and compare all arrays."""
    import jax
    import numpy as np

    from forerun.checkpoint.store import CheckpointStore

    made = bench.made
    with CheckpointStore(bench.folder / "checkpoints", keep=1) as store:
        store.save(made["steps_done"], made["state"], {})
        store.wait()
        made["restored"] = store.restore(made["steps_done"], made["program"].state)
    pairs = zip(jax.tree.leaves(made["state"]), jax.tree.leaves(made["restored"]), strict=True)
    equal = all(np.array_equal(jax.device_get(a), jax.device_get(b)) for a, b in pairs)
    if not equal:
        raise UserError(
            "E-DOCTOR-003", "the checkpoint differs after it was read back", why="arrays differ", fix="check the disk"
        )
    return f"step {made['steps_done']}, {len(jax.tree.leaves(made['state']))} arrays, equal bit for bit"


def _resume(bench: Bench) -> str:
    """Compute one more step from memory and from the checkpoint. The losses must be equal bit for bit."""
    made = bench.made
    batch = made["batch"](made["steps_done"])
    losses = [float(made["step"](state, batch)[1].loss) for state in (made["state"], made["restored"])]
    if losses[0] != losses[1]:
        raise UserError(
            "E-DOCTOR-004", "the resumed run differs", why=f"{losses[0]!r} and {losses[1]!r}", fix="report a bug"
        )
    return f"loss {losses[0]:.6f} both from memory and from the checkpoint"


LINES: tuple[tuple[str, Callable[[Bench], str]], ...] = (
    ("device", _device),
    ("data", _prepare_data),
    ("one compiled step", _compiled_step),
    ("gradients equal across devices", _gradients),
    ("training", _train),
    ("checkpoint saved and read back", _save_and_restore),
    ("resumed", _resume),
)
