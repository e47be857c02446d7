"""`build`: the compiled training step of a job, to run by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax

from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.order.batches import Batches
from forerun.errors import UserError
from forerun.hardware.devices import choose
from forerun.objectives.batch import Batch
from forerun.program.build import Program
from forerun.program.state import State
from forerun.reporter import SILENT
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.resolved_job import ResolvedJob
from forerun.resolve.teacher_targets import with_teacher_targets
from forerun.run.compile_step import CompiledStep, compile_step, use_cache
from forerun.run.open_data import Placement, batches_of
from forerun.run.run_devices import program_on
from forerun.trained_model.base_weights import read_file_weights, require_matching_weights
from forerun.verbs.job_files import prepared


class TrainingProgram:
    """The training step of a job on the devices of this machine: the same program that `train` runs.

    ```python
    program = fr.build(job)
    state = program.init()
    for batch in program.batches(steps=10):
        state, metrics = program.step(state, batch)
        print(float(metrics.loss))
    ```

    The step donates its state: after `step(state, batch)`, use the returned state only.

    Attributes:
      job: the job with its open values filled in.
      program: the pure step with the shapes and shardings of its arguments.
    """

    def __init__(self, resolved: ResolvedJob, corpus: Corpus, program: Program) -> None:
        self._resolved, self._corpus, self.program = resolved, corpus, program

    @property
    def job(self) -> Job:
        """The job with its open values filled in."""
        return self._resolved.job

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of devices that the program runs on."""
        return self.program.mesh

    @property
    def hash(self) -> str:
        """The hash of the lowered program, which `plan` and `train` report too. Compiles the step."""
        return self._step.hash

    def init(self) -> State:
        """Return the state before the first step: the weights of the checkpoint that the job names, or random ones."""
        return self.program.initial_state(self.job.seed, read_file_weights(self._resolved, self.program))

    def step(self, state: State, batch: Batch[jax.Array]) -> tuple[State, Any]:
        """Run one training step and return the new state and its metrics. The first call compiles the step.

        Args:
          state: the state before the step. Its memory is reused for the new state, so it cannot be used again.
          batch: a batch of `batches`, or one with the same shapes.

        Returns:
          The state after the step, and metrics such as `loss` and `grad_norm`, which are arrays on the devices.
        """
        return self._step(state, batch)

    def batches(self, *, first: int = 0, steps: int | None = None) -> Iterator[Batch[jax.Array]]:
        """Yield the batches of the run in order, on the devices.

        Args:
          first: the number of batches to skip, such as the step of a checkpoint.
          steps: how many batches to yield; default: up to the last step of the job.
        """
        last = self._resolved.steps if steps is None else first + steps
        for number in range(first, last):
            yield self.batch_at(number)

    def batch_at(self, number: int) -> Batch[jax.Array]:
        """Return batch `number`, counted from 0. It depends on the data, the seed and the number only."""
        return self._placement(self._batches.batch_at(number))

    @cached_property
    def _step(self) -> CompiledStep:
        return compile_step(self.program, SILENT)

    @cached_property
    def _placement(self) -> Placement:
        return Placement(self.program.batch)

    @cached_property
    def _batches(self) -> Batches:
        if self.job.method.data_is_pairs:
            raise UserError(
                "E-RUN-043",
                "the batches of a job with preferences cannot be iterated by hand",
                why="they contain log-probabilities of a reference model, which only `train` computes",
                fix="use forerun.train",
            )
        return batches_of(self._resolved, self.program, self._corpus)


def build(job: Job | str | os.PathLike[str]) -> TrainingProgram:
    """Build the training program of a job on the devices of this machine, without running it.

    Args:
      job: a job, or the path of a job file.

    Returns:
      The program. Its step is compiled on first use.

    Raises:
      UserError: The job has a mistake, its data cannot be read, or it cannot run on these devices.
    """
    resolved = resolve_model(prepared(job))
    use_cache()
    chosen = choose(resolved.job.device, resolved.job.devices)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    require_matching_weights(resolved)
    corpus = with_teacher_targets(resolved, corpus)
    return TrainingProgram(resolved, corpus, program_on(resolved, chosen, corpus.rows.epoch))
