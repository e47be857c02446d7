"""The data of a run: opening with progress, the batches of this host, and their transfer to its devices."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.data.corpus import Corpus
from forerun.data.order.batches import Batches
from forerun.objectives.batch import Batch
from forerun.program.build import Program
from forerun.reporter import Reporter
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolved_job import ResolvedJob


def open_corpus_with_progress(resolved: ResolvedJob, reporter: Reporter, host: tuple[int, int] = (0, 1)) -> Corpus:
    """Return the job's corpus. Show the progress, a summary and warnings on the reporter.

    `host` is this host and the number of hosts, which share the work on a store in a bucket.
    """
    with reporter.phase("data") as phase:
        corpus = open_corpus(resolved, phase, host)
        first_line, *other_lines = corpus.lines()
        phase.detail = first_line
    for line in other_lines:
        reporter.info(f"data  {line}")
    for text in corpus.warnings:
        reporter.warn(text)
    return corpus


def batches_of(resolved: ResolvedJob, program: Program, corpus: Corpus) -> Batches:
    """Return the batches of a run. Each host builds only the rows of its devices.

    The global batch t depends only on the seed and on t. A resumed run, also on another mesh, sees the same batches.
    """
    job, held = resolved.job, Placement(program.batch).held
    return Batches(corpus.rows, seed=job.seed, batch=job.batch, accumulation=program.derived.accumulation, held=held)


class Placement:
    """Places batches on the devices, with the shapes and shardings of `like` [A, B, S]."""

    def __init__(self, like: Batch[jax.ShapeDtypeStruct]) -> None:
        self._like = like

    @cached_property
    def held(self) -> NDArray[np.int64]:
        """The indices in B of the rows on this host's devices, ascending.

        They need not be consecutive, because the order of a mesh follows the links between chips and not the hosts. A
        row that is split over devices of several hosts is built by each of these hosts.
        """
        like = self._like.tokens
        assert like.sharding is not None
        indices = like.sharding.addressable_devices_indices_map(like.shape).values()
        return np.unique(np.concatenate([_rows(index, like.shape) for index in indices]))

    def __call__(self, batch: Batch[NDArray[np.generic]]) -> Batch[jax.Array]:
        """Return the global batch. `batch` contains the rows `held` of this host only."""
        placed: Batch[jax.Array] = jax.tree.map(self._put, self._like, batch)
        return placed

    def _put(self, like: jax.ShapeDtypeStruct, rows: NDArray[np.generic]) -> jax.Array:
        def shard(index: Any) -> NDArray[np.generic]:
            where = np.searchsorted(self.held, _rows(index, like.shape))
            return rows[index[0], where[0] : where[-1] + 1, index[2]]

        return jax.make_array_from_callback(like.shape, like.sharding, shard)


def _rows(index: Any, shape: tuple[int, ...]) -> NDArray[np.int64]:
    return np.arange(*index[1].indices(shape[1]), dtype=np.int64)
