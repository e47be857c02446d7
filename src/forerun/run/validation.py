"""Validation: the loss on held-out documents during a run, the best so far, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.data.corpus import Corpus
from forerun.data.order.mixture import Mixture
from forerun.errors import UserError
from forerun.nn.spec import merge
from forerun.objectives.base import LOSS
from forerun.objectives.batch import Batch
from forerun.objectives.preference import ACCURACY
from forerun.program.build import Program
from forerun.program.compiler_options import compile_lowered
from forerun.program.state import State
from forerun.reporter import Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.open_data import Placement
from forerun.supervise.worker import Worker

ORDER_SEED = 0  # a constant and not the job's seed: all runs evaluate the same rows, so they can be compared


@dataclass(frozen=True)
class Best:
    """The lowest loss so far. Checkpoints and summary.json store the fields by these names.

    Args:
      loss: the lowest loss.
      step: its step, or 0 before the first evaluation.
      looks_since: evaluations since that step.
    """

    loss: float = math.inf
    step: int = 0
    looks_since: int = 0

    def after(self, step: int, loss: float) -> Best:
        """Return the best after an evaluation with this loss."""
        return Best(loss, step) if loss < self.loss else replace(self, looks_since=self.looks_since + 1)


@dataclass(frozen=True)
class ValidationResult:
    """The result of one evaluation. `str(result)` is the message for the user.

    Args:
      step: the step of the evaluated weights.
      loss: the loss of the objective. The lowest one is the best.
      best: the best so far, this evaluation included.
      extra: the other metrics of the objective, by name.
      nats: the text's loss in nats per counted token, or None if the objective does not compute it.
    """

    step: int
    loss: float
    best: Best
    extra: dict[str, float] = field(default_factory=dict)
    nats: float | None = None

    @property
    def metrics_row(self) -> dict[str, float]:
        """Return what metrics.jsonl records about the evaluation."""
        extra = {f"validation_{name}": value for name, value in self.extra.items()}
        perplexity = {} if self.perplexity is None else {"validation_perplexity": self.perplexity}
        return {"validation_loss": self.loss, **perplexity, **extra}

    @property
    def perplexity(self) -> float | None:
        """The perplexity of the text, or None if the objective does not compute it."""
        return None if self.nats is None else math.exp(min(self.nats, 700.0))

    def __str__(self) -> str:
        best = self.best
        rank = "the best so far" if best.step == self.step else f"best {best.loss:.4f} at step {best.step}"
        values = [f"loss {self.loss:.4f}"]
        if self.perplexity is not None:
            values.append(f"perplexity {self.perplexity:.4g}")
        if ACCURACY in self.extra:
            values.append(f"accuracy {self.extra[ACCURACY]:.1%}")
        return f"validation at step {self.step}: {', '.join(values)}, {rank}"


class Validation:
    """Evaluates the weights on held-out documents. Without such documents, an evaluation is never due.

    The constructor compiles the evaluation, because nothing may be compiled between steps.
    """

    def __init__(self, resolved: ResolvedJob, program: Program, corpus: Corpus, reporter: Reporter) -> None:
        job, settings = resolved.job, resolved.job.validation
        self._every = settings.every or job.checkpoint.evaluation_steps
        self._patience, self._last = settings.patience, program.derived.steps
        self._rows, self._nats = corpus.kept, program.method.objective.nats
        self.best = Best()
        self._latest_loss: float | None = None
        self._latest_step = 0
        if corpus.kept is None:  # the job does not ask for validation
            return
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding), program.batch
        )
        self._placed, rows = Placement(like), like.tokens.shape[1]
        self._batches = [*batches_of(corpus.kept, rows, settings.batches, self._placed.held)]
        with reporter.phase("compile validation") as phase:
            with jax.set_mesh(program.mesh):
                lowered = jax.jit(program.evaluate).lower(program.state.params, like)
            require_nats(self._nats, [LOSS, *lowered.out_info.told])
            self._run = compile_lowered(lowered, program.compiler_options)
            phase.detail = f"{min(len(corpus.kept), rows * settings.batches)} of {len(corpus.kept)} rows"

    def is_due(self, step: int) -> bool:
        """Return whether the weights are evaluated after this step."""
        return self._rows is not None and (step % self._every == 0 or step == self._last)

    def is_pending(self, step: int) -> bool:
        """Return whether a stop interrupted the evaluation that was due after this step."""
        return step > 0 and self.is_due(step) and self._latest_step < step

    @property
    def is_exhausted(self) -> bool:
        """Whether the run ends early: the last `validation.patience` evaluations found no lower loss."""
        return self._patience is not None and self.best.looks_since >= self._patience

    @property
    def stop_reason(self) -> str:
        """Why the run ends before its last step, for the user."""
        best = f"the best was {self.best.loss:.4f} at step {self.best.step}"
        return f"no lower validation loss in {self._patience} evaluations; {best}"

    def evaluate(self, step: int, state: State, worker: Worker) -> ValidationResult | None:
        """Evaluate the weights, or their moving average if there is one.

        All hosts evaluate each batch together, and they may stop between two batches.

        Returns:
          The result, or None if all hosts stop before it is complete.
        """
        params = state.params if state.average is None else merge(state.average, state.params)
        worker.pulse.phase("evaluate")
        sums = []
        for batch in self._batches:
            if not worker.stop.go():
                return None
            sums.append(self._run(params, self._placed(batch)))
        total = jax.tree.map(lambda *parts: float(np.sum(parts, dtype=np.float64)), *jax.device_get(sums))
        weight = max(1.0, total.weight)
        loss = total.loss / weight
        extra = {name: value / weight for name, value in total.told.items()}
        nats = None if self._nats is None else total.named(self._nats) / weight
        self.best, self._latest_loss, self._latest_step = self.best.after(step, loss), loss, step
        return ValidationResult(step, loss, self.best, extra, nats)

    def record(self, step: int, train_loss: float | None) -> dict[str, Any]:
        """Return what the checkpoint of this step records about validation, for `resume`.

        The `loss` ranks the checkpoints. It is the training loss in a run without held-out documents, and None if
        the weights of this step were not evaluated, or if no token of the step's batch had a loss.
        """
        if self._rows is None:
            return {"loss": train_loss}
        best = {"validation": asdict(self.best)} if self.best.step else {}
        loss = self._latest_loss if self._latest_step == step else None
        return {"loss": loss, "looked": self._latest_step, **best}

    def resume(self, record: dict[str, Any], step: int) -> None:
        """Continue from the record of the checkpoint of this step."""
        self.best = Best(**record.get("validation", {}))
        self._latest_step = record.get("looked", step)


def require_nats(name: str | None, sums: list[str]) -> None:
    """Raise if `nats` of a custom objective names a sum that the objective does not return."""
    if name is not None and name not in sums:
        raise UserError(
            "E-RUN-041",
            f"the objective's nats is {name!r}, and it returns no such sum",
            why=f"its sums are {', '.join(sums)}",
            fix="name one of them, or set nats to None to report no perplexity",
        )


def batches_of(kept: Mixture, rows: int, most: int, held: NDArray[np.int64]) -> Iterator[Batch[NDArray[np.generic]]]:
    """Yield this host's part of the validation batches [1, rows, S].

    Rows are repeated to fill the last batch. The repeated rows have weight 0.

    Args:
      kept: the held-out rows.
      rows: rows of a batch, on all hosts.
      most: the maximum number of batches.
      held: the rows of a batch that this host builds.
    """
    ids = kept.drawn(np.arange(min(len(kept), rows * most), dtype=np.int64), ORDER_SEED)
    for start in range(0, len(ids), rows):
        mine = ids[start : start + rows]
        filled = np.resize(mine, rows)[held]
        arrays = kept.take(filled)
        arrays["weights"] = arrays["weights"] * (held < len(mine))[:, None].astype(arrays["weights"].dtype)
        yield Batch.of({name: array[None] for name, array in arrays.items()})
