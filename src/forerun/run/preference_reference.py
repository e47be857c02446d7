"""Reference log-probabilities for preference training, computed once before the first step and cached.

The reference is the model that the run starts with. A cache file is stored next to the tokens. It has two numbers per
pair: the log-probabilities of the chosen and of the rejected answer. Its name contains a hash of the data and of the
weights. It is written every 30 seconds, so that an interrupted run computes only the missing pairs.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from forerun.data.corpus import Corpus, CorpusPart
from forerun.data.order.pairs import PairReferences, Pairs
from forerun.data.order.rows import PackedRows
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.objectives.batch import Batch
from forerun.objectives.pairs import PAIRS
from forerun.objectives.preference import Preference
from forerun.program.build import Program
from forerun.program.compiler_options import compile_lowered
from forerun.program.fingerprint import tree_fingerprint
from forerun.reporter import Phase, Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.open_data import Placement
from forerun.run_folder.run_folder import RunFolder, newest_record
from forerun.supervise.worker import Worker
from forerun.trained_model.base_weights import read_file_weights
from forerun.units import Seconds

FORMAT = 1
FOLDER = "reference"  # in the folder of the token store
REFERENCE = "reference"  # key of a checkpoint's record
SAVE_SECONDS = 30.0
BASE_DIGITS = 8
TOLD = {
    "base": "the model without its adapters, in every step",
    "beside": "a frozen copy of the model, in every step",
    "cached": "the starting model, evaluated once on every pair",
}

Said = NDArray[np.float32]  # log-probabilities [pairs, 2]: chosen, rejected; NaN if not computed yet


def with_reference(
    resolved: ResolvedJob, program: Program, corpus: Corpus, folder: RunFolder, reporter: Reporter, worker: Worker
) -> Corpus:
    """Return the corpus, with reference log-probabilities if the objective reads them from the batches.

    Other corpora are returned unchanged: those of other objectives, and those whose reference runs in every step.
    """
    objective = program.method.objective
    if not isinstance(objective, Preference):
        return corpus
    reporter.info(f"reference: {TOLD[objective.reference]}")
    if objective.reference != "cached":
        return corpus
    worker.pulse.phase(FOLDER)
    with reporter.phase(FOLDER) as phase:
        asked = ReferenceModel(resolved, program, folder, worker, phase, reporter)
        train = asked.references([(part, part.rows) for part in corpus.parts], "train")
        held_out = [(part, part.kept) for part in corpus.parts if part.kept is not None and len(part.kept)]
        kept = asked.references(held_out, "validation")
        pair_count = sum(map(len, (*train.values, *kept.values)))
        phase.detail = f"{pair_count} pairs, {asked.computed} computed now"
    return replace(
        corpus,
        rows=corpus.rows.with_extra(train),
        kept=corpus.kept.with_extra(kept) if corpus.kept is not None else None,
    )


class ReferenceModel:
    """The reference model: the weights that the run starts with.

    A run that has recorded their fingerprint reads the weights only if log-probabilities are missing.

    Args:
      phase: shows the rows that are done and the remaining time.
      reporter: receives warnings.
    """

    def __init__(
        self,
        resolved: ResolvedJob,
        program: Program,
        folder: RunFolder,
        worker: Worker,
        phase: Phase,
        reporter: Reporter,
    ) -> None:
        self._resolved, self._program, self._worker = resolved, program, worker
        self._folder, self._phase, self._reporter = folder, phase, reporter
        self._model = str(folder.path.resolve()) if resolved.config is None else repr(resolved.config)
        self._params: Any = None
        self._run: Any = None
        self.computed = 0
        self._base = self._noted() or self._begun()

    def references(self, parts: Sequence[tuple[CorpusPart, PackedRows]], side: str) -> PairReferences:
        """Return the reference's log-probabilities of all pairs of these parts, in their order."""
        pairs = tuple(rows for _, rows in parts if isinstance(rows, Pairs))
        assert len(pairs) == len(parts)
        values = (self._values(part, side, rows) for (part, _), rows in zip(parts, pairs, strict=True))
        return PairReferences(pairs, tuple(values))

    def _values(self, part: CorpusPart, side: str, rows: Pairs) -> Said:
        """Return the log-probabilities of one part of the data, from its cache file or computed now."""
        key = f"{FORMAT} {rows.digest} {self._base} {self._program.compute.dtype} {self._model}"
        identity = hashlib.sha256(key.encode()).hexdigest()[:32]
        path = part.store.local_folder / FOLDER / f"{side}-{identity}.bin"
        found = np.full((rows.report.documents, 2), np.nan, np.float32)
        try:
            known = read_log_probs(path, len(found)) if self._worker.first else None
        except ValueError as error:
            self._reporter.warn(f"{path} is damaged and is computed again: {error}")
            known = None
        found = _of_first_host(found if known is None else known)
        self._compute(rows, found, path)
        return found

    def _compute(self, rows: Pairs, found: Said, path: Path) -> None:
        """Fill in the missing values of `found`, and write them to `path` from time to time."""
        numbers = rows.numbers(np.arange(len(rows)))
        lacking = np.isnan(found[np.maximum(numbers, 0)]).any(-1) & (numbers >= 0)
        missing = np.flatnonzero(lacking.any(1))
        if not len(missing):
            return
        run, placed, many = self._ready()
        began = saved = time.monotonic()
        for start in range(0, len(missing), many):
            some = missing[start : start + many]
            arrays = rows.take(np.resize(some, many)[placed.held])
            said = np.asarray(run(self._params, placed(Batch.of({name: a[None] for name, a in arrays.items()}))))
            mine = rows.numbers(some)
            found[mine[mine >= 0]] = said[: len(some)][mine >= 0]
            now, done = time.monotonic(), start + len(some)
            self._show(done, len(missing), (now - began) / done * (len(missing) - done))
            if self._worker.first and (now - saved > SAVE_SECONDS or done == len(missing)):
                write_log_probs(path, found)
                saved = now
        self.computed += int(lacking.sum())

    def _show(self, done: int, total: int, left_seconds: float) -> None:
        """Show the progress, and report it to the supervisor."""
        self._worker.pulse.phase(FOLDER)
        self._phase.detail = f"{done / total:.0%} of {total} rows" + (
            f"  eta {Seconds(left_seconds)}" if done < total else ""
        )

    def _ready(self) -> tuple[Any, Placement, int]:
        """Return the compiled function, the placement of its batches, and the rows of a batch.

        Reads the weights if that has not been done yet.
        """
        program = self._program
        objective = program.method.objective
        assert isinstance(objective, Preference)
        if self._params is None:
            now = self._begun()
            if now != self._base:
                raise UserError(
                    "E-RUN-036",
                    f"the weights of {self._resolved.job.model.name} are not those that the run started with",
                    why="they are the reference model, and their log-probabilities of the pairs are lost "
                    f"(fingerprint {now} now, {self._base} then)",
                    fix="restore the original files of the model, or start over with --fresh",
                )
        extras = {PAIRS: program.batch.extras[PAIRS]}
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding),
            replace(program.batch, extras=extras),
        )

        def log_probabilities(params: Any, batch: Batch[jax.Array]) -> jax.Array:
            own = objective.own(params)
            return objective.said(program.model, own, jax.tree.map(lambda x: x[0], batch), program.compute)

        if self._run is None:
            with jax.set_mesh(program.mesh):
                everywhere = NamedSharding(program.mesh, PartitionSpec())
                lowered = jax.jit(log_probabilities, out_shardings=everywhere).lower(self._params, like)
            self._run = compile_lowered(lowered, program.compiler_options)
        return self._run, Placement(like), like.tokens.shape[1]

    def _begun(self) -> str:
        """Place the starting weights on the devices, and return their fingerprint as hex digits.

        The fingerprint does not depend on the mesh. A new run records it in its folder.
        """
        program, job = self._program, self._resolved.job
        wanted = jax.tree.map(lambda leaf: leaf.sharding, program.state.params)
        with jax.set_mesh(program.mesh):
            made = jax.jit(
                lambda given, key: program.started(given, key).params, out_shardings=wanted, donate_argnums=0
            )
            self._params = made(read_file_weights(self._resolved, program), jax.random.key(job.seed))

            base = f"{int(jax.jit(tree_fingerprint)(self._params)):0{BASE_DIGITS}x}"
        if self._worker.first and recorded_base(self._folder) is None:
            _note_base(self._folder, base)
        return base

    def _noted(self) -> str | None:
        """Return the fingerprint that host 0 recorded when the run started, or None for a new run.

        Host 0 sends it to the other hosts, which may not have access to the run's folder.
        """
        noted = self._restored_note() if self._worker.first else ""
        told = _of_first_host(np.frombuffer(noted.rjust(BASE_DIGITS).encode(), np.uint8))
        return told.tobytes().decode().strip() or None

    def _restored_note(self) -> str:
        """Return the fingerprint in the checkpoint, else that in the run's folder, else an empty string.

        If the two differ, the file in the folder is restored from the checkpoint.
        """
        record = newest_record(self._folder.checkpoints(self._resolved.job)) or {}
        noted, saved = recorded_base(self._folder), record.get(REFERENCE)
        if saved and noted != saved:
            self._reporter.warn(
                f"{self._folder.reference} is missing, damaged or changed; it is restored from the checkpoint"
            )
            _note_base(self._folder, saved)
        elif noted is None and self._folder.reference.exists():
            self._reporter.warn(f"{self._folder.reference} is damaged; it is written again from the model's files")
        return saved or noted or ""


def recorded_base(folder: RunFolder) -> str | None:
    """Return the recorded fingerprint of the starting weights, or None if the file is missing or damaged."""
    try:
        base = json.loads(folder.reference.read_bytes())["base"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return base if isinstance(base, str) and re.fullmatch(rf"[0-9a-f]{{{BASE_DIGITS}}}", base) else None


def _note_base(folder: RunFolder, base: str) -> None:
    atomic_write(folder.reference, json.dumps({"base": base}) + "\n")


def read_log_probs(path: Path, pairs: int) -> Said | None:
    """Return the log-probabilities in a cache file, or None if it does not exist.

    Raises:
      ValueError: the file is damaged, or has another number of pairs.
    """
    try:
        head, _, content = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    about = json.loads(head)
    if not isinstance(about, dict) or about.get("sha256") != hashlib.sha256(content).hexdigest():
        raise ValueError("its checksum differs")
    if about.get("pairs") != pairs:
        raise ValueError(f"it has {about.get('pairs')} pairs, and the data has {pairs}")
    return np.frombuffer(content, "<f4").reshape(-1, 2).astype(np.float32)


def write_log_probs(path: Path, said: Said) -> None:
    """Write log-probabilities to a cache file, atomically."""
    content = said.astype("<f4").tobytes()
    about = {"format": FORMAT, "pairs": len(said), "sha256": hashlib.sha256(content).hexdigest()}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(about).encode() + b"\n" + content)


def _of_first_host(array: NDArray[Any]) -> NDArray[Any]:
    """Return host 0's array on all hosts. Otherwise the hosts would compute different sets of missing pairs."""
    if jax.process_count() == 1:
        return array
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return np.array(broadcast_one_to_all(array))
