"""The rows of each batch: a pure function of seed and step, the same on any number of hosts and devices.

Batches are cut from the endless order of a `Mixture`, in which epochs follow each other without gaps. Without weights,
every row is used exactly once per epoch, and none is dropped at its end. The rows of any batch are computed directly,
without the batches before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forerun.data.order.mixture import Mixture
from forerun.data.order.rows import Example, PackedRows
from forerun.errors import UserError
from forerun.objectives.batch import Batch


class Batches:
    """Global batches of rows, as arrays [A, B, S]: micro-batches, rows of a micro-batch, positions.

    Args:
      rows: the data.
      seed: selects the order of the rows.
      batch: rows of a global batch, A * B.
      accumulation: micro-batches of a global batch, A. Micro-batch a has the rows a*B .. (a+1)*B - 1.
      held: which of the B rows this host's devices hold. The host builds only these. The order of the global batch
        does not depend on it. None: all rows.

    Raises:
      UserError: `batch` is not a multiple of `accumulation`, or the data has fewer rows than a batch.
    """

    def __init__(
        self,
        rows: PackedRows | Mixture,
        *,
        seed: int,
        batch: int,
        accumulation: int = 1,
        held: NDArray[np.int64] | None = None,
    ) -> None:
        self.rows = rows if isinstance(rows, Mixture) else Mixture([rows])
        require_one_batch(rows, batch)
        if batch % accumulation:
            raise UserError(
                "E-DATA-011",
                f"batch {batch} does not divide into {accumulation} micro-batches",
                why=f"{batch} / {accumulation} = {batch / accumulation:g}",
                fix=f"batch={batch // accumulation * accumulation or accumulation}, or another micro_batch",
            )
        micro = batch // accumulation
        self._seed, self._batch = seed, batch
        self._shape = (accumulation, micro)
        self._held = np.arange(micro) if held is None else held

    def ids_at(self, step: int) -> NDArray[np.int64]:
        """Return the row numbers of global batch `step` (counted from 0), in order."""
        return self.rows.drawn(step * self._batch + np.arange(self._batch, dtype=np.int64), self._seed)

    def examples_at(self, step: int) -> list[Example]:
        """Return the examples of global batch `step`, in order: (part, document) or (part, document, piece)."""
        return [example for row in self.ids_at(step).tolist() for example in self.rows.examples(row)]

    def batch_at(self, step: int) -> Batch[NDArray[np.generic]]:
        """Return this host's part of batch `step` as NumPy arrays [A, B, S]."""
        ids = self.ids_at(step).reshape(self._shape)[:, self._held]
        arrays = self.rows.take(ids.ravel())
        return Batch.of({name: array.reshape(*ids.shape, *array.shape[1:]) for name, array in arrays.items()})


def require_one_batch(rows: PackedRows | Mixture, batch: int) -> None:
    """Raise UserError if the data has fewer rows than a batch: a step would contain a row twice."""
    count = len(rows)
    if count < batch:
        raise UserError(
            "E-DATA-013",
            f"the data is smaller than one batch: {count} rows, batch {batch}",
            why=f"the documents make {count} rows of {rows.sequence} tokens",
            fix=f"batch={count}, a shorter sequence, or more text" if count else "a shorter sequence, or more text",
        )
