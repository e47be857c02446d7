"""The command `forerun doctor --smoke`: about a minute of real training, with one line per test."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.errors import UserError

TRAIN_SECONDS = 20.0
SECONDS_VARIABLE = "FORERUN_SMOKE_SECONDS"  # replaces TRAIN_SECONDS: a rented machine is billed while it is tested
STEPS_MOST = 400
KEYS = ("device", "devices", "mesh")  # of the job, which the user may change


class SmokeFailed(Exception):
    """A test failed, and its line was printed."""


def run(values: dict[str, Any] | None = None) -> int:
    """Run the tests until one fails, and print a line for each. Return 0 if all pass, else 2.

    Args:
      values: keys of `KEYS` with the values to use, from `values_of`.
    """
    with tempfile.TemporaryDirectory(prefix="forerun-smoke-") as folder:
        try:
            _run_tests(Path(folder), values or {})
        except SmokeFailed:
            return UserError.exit_code
    return 0


@contextmanager
def _test(title: str) -> Iterator[list[str]]:
    """Print the line of a test: ok with the text that the block appends to the list, or FAIL with the error.

    Raises:
      SmokeFailed: the block raised an exception.
    """
    began, results = time.perf_counter(), list[str]()
    try:
        yield results
    except Exception as error:  # this command exists to report any failure
        if isinstance(error, UserError):
            print(f"FAIL  {title}: {error.what}")
            for label, text in (("why", error.why), ("fix", error.fix)):
                if text:
                    print("\n".join(f"      {line}" for line in f"{label}: {text}".splitlines()))
        else:
            print(f"FAIL  {title}: {type(error).__name__}: {error}")
        raise SmokeFailed from error
    print(f"ok    {title}: {results[-1]} ({time.perf_counter() - began:.1f} s)", flush=True)


def _run_tests(folder: Path, values: dict[str, Any]) -> None:
    """Train, save and resume a small job on this machine, with `values` of the user in place of those of the job."""
    import jax
    import numpy as np

    from forerun.checkpoint.store import CheckpointStore
    from forerun.data.order.batches import Batches
    from forerun.hardware.devices import DeviceChoice, choose
    from forerun.program.build import Program
    from forerun.program.compiler_options import compile_lowered
    from forerun.resolve.job_corpus import open_corpus
    from forerun.resolve.resolve_model import resolve_model
    from forerun.resolve.resolved_job import ResolvedJob
    from forerun.run.open_data import Placement, batches_of
    from forerun.run.run_devices import program_on

    with _test("device") as results:
        chosen = choose(values.get("device", "auto"), values.get("devices"))
        results.append(f"{len(chosen.devices)} x {chosen.devices[0].device_kind}, {chosen.reason}")

    with _test("data") as results:
        write_help_texts(folder / "text")
        # The job for one device has the default mesh: the user's mesh is for all devices.
        one_device_job = resolve_model(smoke_job(folder, len(chosen.devices)))
        corpus = open_corpus(one_device_job)
        one_device_job = one_device_job.with_data(corpus)
        resolved = one_device_job.with_values(**values)
        results.append(corpus.lines()[0])

    def compiled(resolved: ResolvedJob, devices: DeviceChoice) -> tuple[Program, Any, Batches]:
        """Return the program on some devices, its compiled step and its batches."""
        program = program_on(resolved, devices, corpus.rows.epoch)
        step = compile_lowered(program.trace().lower(), program.compiler_options)
        return program, step, batches_of(resolved, program, corpus)

    with _test("one compiled step") as results:
        program, step, batches = compiled(resolved, chosen)
        schedule, placement = program.placed_schedule(), Placement(program.batch)
        state, metrics = step(program.initial_state(resolved.job.seed), placement(batches.batch_at(0)), schedule)
        first_loss, first_norm = float(metrics.loss), float(metrics.grad_norm)
        results.append(f"loss {first_loss:.3f} nats per byte")

    with _test("gradients equal across devices") as results:
        if len(chosen.devices) == 1:
            results.append("one device, nothing to compare")
        else:
            alone = DeviceChoice(chosen.platform, chosen.devices[:1], chosen.reason)
            other, other_step, other_batches = compiled(one_device_job, alone)
            batch = Placement(other.batch)(other_batches.batch_at(0))
            metrics = other_step(other.initial_state(resolved.job.seed), batch, other.placed_schedule())[1]
            norm = float(metrics.grad_norm)
            difference = abs(norm - first_norm) / norm
            if difference > 2e-2:  # smaller differences come from bfloat16 sums in another order
                raise UserError(
                    "E-DOCTOR-001",
                    f"gradient norms differ by {difference:.2%}",
                    why=f"{norm} alone, {first_norm} together",
                    fix="report a bug",
                )
            results.append(f"norm {norm:.4f} on one device, {first_norm:.4f} on {len(chosen.devices)}")

    with _test("training") as results:
        seconds = float(os.environ.get(SECONDS_VARIABLE) or TRAIN_SECONDS)
        began, done = time.perf_counter(), 1
        while done < STEPS_MOST and (done < 5 or time.perf_counter() - began < seconds):
            state, metrics = step(state, placement(batches.batch_at(done)), schedule)
            metrics.loss.block_until_ready()  # steps that are only dispatched would be waited for after the limit
            done += 1
        loss, tokens = float(metrics.loss), done * program.derived.tokens_per_step
        if not loss < first_loss:
            raise UserError(
                "E-DOCTOR-002",
                f"loss did not fall: {first_loss:.3f} -> {loss:.3f}",
                why=f"{done} steps on simple text lower the loss if the devices compute correctly",
                fix="report a bug",
            )
        speed = tokens / (time.perf_counter() - began)
        results.append(f"{done} steps, loss {first_loss:.3f} -> {loss:.3f}, {speed:,.0f} tokens/s")

    with _test("checkpoint saved and read back") as results:
        with CheckpointStore(folder / "checkpoints", keep=1) as store:
            store.save(done, state, {})
            store.wait()
            restored = store.restore(done, program.state)
        pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True))
        if not all(np.array_equal(jax.device_get(a), jax.device_get(b)) for a, b in pairs):
            raise UserError(
                "E-DOCTOR-003",
                "the checkpoint differs after it was read back",
                why="arrays differ",
                fix="check the disk",
            )
        results.append(f"step {done}, {len(pairs)} arrays, equal bit for bit")

    with _test("resumed") as results:
        batch = placement(batches.batch_at(done))
        losses = [float(step(start, batch, schedule)[1].loss) for start in (state, restored)]
        if losses[0] != losses[1]:
            raise UserError(
                "E-DOCTOR-004", "the resumed run differs", why=f"{losses[0]!r} and {losses[1]!r}", fix="report a bug"
            )
        results.append(f"loss {losses[0]:.6f} both from memory and from the checkpoint")


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


def write_help_texts(folder: Path) -> None:
    """Write training data: the help texts that are part of every Python installation."""
    import pydoc_data.topics

    folder.mkdir()
    (folder / "topics.txt").write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")


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
