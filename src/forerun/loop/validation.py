"""Looking at documents that are not trained on: the loss on them while a run goes on, the best so far, and when to
stop for want of a better one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.order.mixture import Mixture
from forerun.errors import UserError
from forerun.loop.placement import Placement
from forerun.nn.spec import merge
from forerun.objectives.base import LOSS
from forerun.objectives.batch import Batch
from forerun.objectives.preference import ACCURACY
from forerun.program.build import Program
from forerun.program.state import State
from forerun.supervise.worker import Worker
from forerun.track.display import Display

ORDER_SEED = 0  # which rows are looked at does not depend on the job's seed: runs can be compared


@dataclass(frozen=True)
class Best:
    """The lowest loss so far, at which step, and how many looks ago."""

    loss: float = math.inf
    step: int = 0
    looks_since: int = 0

    def after(self, step: int, loss: float) -> Best:
        return Best(loss, step) if loss < self.loss else replace(self, looks_since=self.looks_since + 1)


@dataclass(frozen=True)
class Look:
    step: int
    loss: float  # that of the objective, which the best is chosen by
    told: dict[str, float] = field(default_factory=dict)  # what else the objective tells
    nats: float | None = None  # of the text per counted token, if the objective has it

    @property
    def figures(self) -> dict[str, float]:
        """One line of metrics.jsonl."""
        told = {f"validation_{name}": value for name, value in self.told.items()}
        perplexity = {} if self.perplexity is None else {"validation_perplexity": self.perplexity}
        return {"validation_loss": self.loss, **perplexity, **told}

    @property
    def perplexity(self) -> float | None:
        return None if self.nats is None else math.exp(min(self.nats, 700.0))

    def said(self, best: Best) -> str:
        was = "the best so far" if best.step == self.step else f"best {best.loss:.4f} at step {best.step}"
        said = [f"loss {self.loss:.4f}"]
        if self.perplexity is not None:
            said.append(f"perplexity {self.perplexity:.4g}")
        if ACCURACY in self.told:
            said.append(f"accuracy {self.told[ACCURACY]:.1%}")
        return f"validation at step {self.step}: {', '.join(said)}, {was}"


class Validation:
    """Compiled before the first step, like everything else. Without documents to look at, it is never due."""

    def __init__(self, job: Job, program: Program, corpus: Corpus, display: Display) -> None:
        self._every = job.validation.every or job.checkpoint.evaluation_steps
        self._patience = job.validation.patience
        self._rows, self._nats = corpus.kept, program.method.objective.nats
        self.best = Best()
        self._latest: float | None = None  # its loss
        self._looked = 0  # the step of the latest look
        if corpus.kept is None:  # the corpus warns if the job asks for more
            return
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding), program.batch
        )
        self._placed, rows = Placement(like), like.tokens.shape[1]
        self._batches = [*batches_of(corpus.kept, rows, job.validation.batches, self._placed.held)]
        with display.phase("compile validation") as phase:
            options: Any = program.compiler_options or None
            with jax.set_mesh(program.mesh):
                lowered = jax.jit(program.evaluate).lower(program.state.params, like)
            require_nats(self._nats, [LOSS, *lowered.out_info.told])
            self._run = lowered.compile(compiler_options=options)
            phase.detail = f"{min(len(corpus.kept), rows * job.validation.batches)} of {len(corpus.kept)} rows"

    def due(self, step: int, last: int) -> bool:
        return self._rows is not None and (step % self._every == 0 or step == last)

    @property
    def said(self) -> str:
        """Why the run ends before its last step."""
        best = f"the best was {self.best.loss:.4f} at step {self.best.step}"
        return f"no lower validation loss in {self._patience} looks; {best}"

    @property
    def exhausted(self) -> bool:
        """As many looks without a lower loss as the job has patience for."""
        return self._patience is not None and self.best.looks_since >= self._patience

    def look(self, step: int, state: State, worker: Worker) -> Look | None:
        """The loss of the weights (of their moving average if there is one); None if all hosts stop meanwhile."""
        params = state.params if state.average is None else merge(state.average, state.params)
        worker.pulse.phase("evaluate")
        sums = []
        for batch in self._batches:
            if not worker.stop.go():
                return None
            sums.append(self._run(params, self._placed(batch)))
        total = jax.tree.map(lambda *parts: float(np.sum(parts, dtype=np.float64)), *jax.device_get(sums))
        weight = max(1.0, total.weight)
        told = {name: value / weight for name, value in total.told.items()}
        nats = None if self._nats is None else total.named(self._nats) / weight
        found = Look(step, total.loss / weight, told, nats)
        self.best, self._latest, self._looked = self.best.after(step, found.loss), found.loss, step
        return found

    def record(self, step: int, loss: float) -> dict[str, Any]:
        """What a checkpoint of this step must know so that a resumed run goes on alike, and the loss that the best of
        them is chosen by: the training loss where there is nothing to look at, none where a look is still owed."""
        if self._rows is None:
            return {"loss": loss}
        best = {"validation": asdict(self.best)} if self.best.step else {}
        return {"loss": self._latest if self._looked == step else None, "looked": self._looked, **best}

    def resume(self, record: dict[str, Any], step: int) -> None:
        self.best = Best(**record.get("validation", {}))
        self._looked = record.get("looked", step)

    def owed(self, step: int, last: int) -> bool:
        """Whether a stop fell into the look that was due at this step."""
        return step > 0 and self.due(step, last) and self._looked < step


def require_nats(name: str | None, sums: list[str]) -> None:
    """An objective of the user's own may name what it does not tell."""
    if name is not None and name not in sums:
        raise UserError(
            f"the objective's nats is {name!r}, and it tells no such sum",
            why=f"its sums are {', '.join(sums)}",
            fix="name one of them, or None: then no perplexity is told",
        )


def batches_of(kept: Mixture, rows: int, most: int, held: NDArray[np.int64]) -> Iterator[Batch[NDArray[np.generic]]]:
    """This host's part of batches [1, rows, S]; rows that fill up the last one weigh nothing."""
    ids = kept.drawn(np.arange(min(len(kept), rows * most), dtype=np.int64), ORDER_SEED)
    for start in range(0, len(ids), rows):
        mine = ids[start : start + rows]
        filled = np.resize(mine, rows)[held]
        arrays = kept.take(filled)
        arrays["weights"] = arrays["weights"] * (held < len(mine))[:, None].astype(arrays["weights"].dtype)
        yield Batch.of({name: array[None] for name, array in arrays.items()})
