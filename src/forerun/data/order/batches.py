"""Which rows make which batch: a pure function of seed and step, the same on any number of hosts and devices.

Batches are cut from the endless order of a `Mixture`: epochs laid end to end, so every row is used exactly once per
epoch and none is dropped at an epoch's end. Any batch is found at once, however many rows there are and however late
it comes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forerun.data.order.enough import require_one_batch
from forerun.data.order.mixture import Mixture
from forerun.data.order.rows import Example, PackedRows
from forerun.errors import UserError
from forerun.objectives.batch import Batch


class Batches:
    """Global batches of `batch` rows, shaped [accumulation, batch / accumulation, S].

    Micro-batch a holds rows a*B .. (a+1)*B of the global batch. `held` are the numbers in B that this host's devices
    hold, of which alone it builds the rows; the order of the global batch does not depend on it.
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
                f"batch {batch} does not divide into {accumulation} micro-batches",
                why=f"{batch} / {accumulation} = {batch / accumulation:g}",
                fix=f"batch={batch // accumulation * accumulation or accumulation}, or another micro_batch",
            )
        micro = batch // accumulation
        self._seed, self._batch = seed, batch
        self._shape = (accumulation, micro)
        self._held = np.arange(micro) if held is None else held

    @property
    def examples_per_epoch(self) -> int:
        """Rows; of a weighted mixture, until the part that lasts longest has been seen once."""
        return self.rows.epoch

    def ids_at(self, step: int) -> NDArray[np.int64]:
        """The row numbers of global batch `step` (counted from 0), in order."""
        return self.rows.drawn(step * self._batch + np.arange(self._batch, dtype=np.int64), self._seed)

    def examples_at(self, step: int) -> list[Example]:
        """(part, document) or (part, document, piece) of all that stand in global batch `step`, in order."""
        return [example for row in self.ids_at(step).tolist() for example in self.rows.examples(row)]

    def batch_at(self, step: int) -> Batch[NDArray[np.generic]]:
        """Batch `step` as NumPy arrays [A, B, S]: this host's part of it."""
        ids = self.ids_at(step).reshape(self._shape)[:, self._held]
        arrays = self.rows.take(ids.ravel())
        return Batch.of({name: array.reshape(*ids.shape, *array.shape[1:]) for name, array in arrays.items()})
