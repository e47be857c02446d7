"""What the model that a run begins with says of every pair: computed once, and kept beside the tokens.

A file holds two numbers for each pair, and which pairs and which weights they belong to; it is written now and then, so
that a run which was ended meanwhile computes only what is missing.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from forerun.config.schema import Job
from forerun.data.corpus import Corpus, Part
from forerun.data.order.pairs import Pairs, Referenced
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.loop.folder import RunFolder, newest_record
from forerun.loop.given import given_of
from forerun.loop.placement import Placement
from forerun.models.pretrained import config_of
from forerun.models.sizes import is_plugin
from forerun.objectives.batch import Batch
from forerun.objectives.pairs import PAIRS
from forerun.objectives.preference import Preference
from forerun.program.build import Program
from forerun.program.fingerprint import whole_fingerprint
from forerun.supervise.worker import Worker
from forerun.track.display import Display, Phase
from forerun.units import Seconds

FORMAT = 1
FOLDER = "reference"  # in the folder of the tokens
REFERENCE = "reference"  # key of a checkpoint's record
SAVE_SECONDS = 30.0
BASE_DIGITS = 8
TOLD = {
    "base": "the model without its adapters, in every step",
    "beside": "a frozen copy of the model, in every step",
    "cached": "the model as it is now, asked once about every pair",
}

Said = NDArray[np.float32]  # [pairs, 2]; not a number: not yet known


def referenced(
    job: Job, program: Program, corpus: Corpus, folder: RunFolder, display: Display, worker: Worker
) -> Corpus:
    """The corpus as the job's objective wants it: where it reads the reference from the batches, with that in them."""
    objective = program.method.objective
    if not isinstance(objective, Preference):
        return corpus
    display.say(f"reference: {TOLD[objective.reference]}")
    if objective.reference != "cached":
        return corpus
    worker.pulse.phase(FOLDER)
    with display.phase(FOLDER) as phase:
        asked = Asked(job, program, folder, worker, partial(_shown, phase, worker), display.warn)
        rows = [asked.rows(part, "train", part.rows, display) for part in corpus.parts]
        held = [part for part in corpus.parts if part.kept is not None and len(part.kept)]
        kept = [asked.rows(part, "validation", part.kept, display) for part in held]
        phase.detail = f"{sum(len(one.said) for one in (*rows, *kept))} pairs, {asked.computed} computed now"
    return replace(
        corpus,
        rows=corpus.rows.with_parts(rows),
        kept=corpus.kept.with_parts(kept) if corpus.kept is not None else None,
    )


class Asked:
    """The starting model, which is read from its files only if something is missing."""

    def __init__(
        self,
        job: Job,
        program: Program,
        folder: RunFolder,
        worker: Worker,
        tell: Callable[[int, int, float], None],
        warn: Callable[[str], None],
    ) -> None:
        self._job, self._program, self._worker, self._tell, self._warn = job, program, worker, tell, warn
        self._folder = folder
        self._model = str(folder.path.resolve()) if is_plugin(job.model) else repr(config_of(job.model))
        self._params: Any = None
        self._run: Any = None
        self.computed = 0
        self._base = self._noted() or self._begun()

    def rows(self, part: Part, side: str, rows: Any, display: Display) -> Referenced:
        assert isinstance(rows, Pairs)
        said = f"{FORMAT} {rows.digest} {self._base} {self._program.compute.dtype} {self._model}"
        identity = hashlib.sha256(said.encode()).hexdigest()[:32]
        path = part.store.folder / FOLDER / f"{side}-{identity}.bin"
        found = np.full((rows.report.documents, 2), np.nan, np.float32)
        try:
            known = read_said(path, len(found)) if self._worker.first else None
        except ValueError as error:
            display.warn(f"{path} is damaged and is made again: {error}")
            known = None
        found = _of_first_host(found if known is None else known)
        self._compute(rows, found, path)
        return Referenced(rows, found)

    def _compute(self, rows: Pairs, found: Said, path: Path) -> None:
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
            self._tell(done, len(missing), (now - began) / done * (len(missing) - done))
            if self._worker.first and (now - saved > SAVE_SECONDS or done == len(missing)):
                write_said(path, found)
                saved = now
        self.computed += int(lacking.sum())

    def _ready(self) -> tuple[Any, Placement, int]:
        """The compiled question, how a batch comes to it, and rows of a batch."""
        program = self._program
        objective = program.method.objective
        assert isinstance(objective, Preference)
        if self._params is None:
            now = self._begun()
            if now != self._base:
                raise UserError(
                    f"the weights of {self._job.model.name} are not those that the run began with",
                    why=f"they are the reference, and what they said of the pairs is lost (fingerprint {now} now, "
                    f"{self._base} then)",
                    fix="put the model's files back as they were, or start over with --fresh",
                )
        extras = {PAIRS: program.batch.extras[PAIRS]}
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding),
            replace(program.batch, extras=extras),
        )

        def asked(params: Any, batch: Batch[jax.Array]) -> jax.Array:
            own = objective.own(params)
            return objective.said(program.model, own, jax.tree.map(lambda x: x[0], batch), program.compute)

        if self._run is None:
            with jax.set_mesh(program.mesh):
                everywhere = NamedSharding(program.mesh, PartitionSpec())
                lowered = jax.jit(asked, out_shardings=everywhere).lower(self._params, like)
            options: Any = program.compiler_options or None
            self._run = lowered.compile(compiler_options=options)
        return self._run, Placement(like), like.tokens.shape[1]

    def _begun(self) -> str:
        """The starting model on its devices, and a number for it that is the same on every mesh. A new run notes it."""
        program, job = self._program, self._job
        wanted = jax.tree.map(lambda leaf: leaf.sharding, program.state.params)
        with jax.set_mesh(program.mesh):
            made = jax.jit(
                lambda given, key: program.started(given, key).params, out_shardings=wanted, donate_argnums=0
            )
            self._params = made(given_of(job, program), jax.random.key(job.seed))

            base = f"{int(jax.jit(whole_fingerprint)(self._params)):0{BASE_DIGITS}x}"
        if self._worker.first and noted_base(self._folder) is None:
            _note_base(self._folder, base)
        return base

    def _noted(self) -> str | None:
        """Return what host 0 wrote when the run began, or None for a new run. Other hosts may not see its folder."""
        noted = self._restored_note() if self._worker.first else ""
        told = _of_first_host(np.frombuffer(noted.rjust(BASE_DIGITS).encode(), np.uint8))
        return told.tobytes().decode().strip() or None

    def _restored_note(self) -> str:
        """Return the number in the folder, or the checkpoint's if they differ; empty if neither has one."""
        record = newest_record(self._folder.checkpoints(self._job)) or {}
        noted, saved = noted_base(self._folder), record.get(REFERENCE)
        if saved and noted != saved:
            self._warn(f"{self._folder.reference} is missing, damaged or changed; it is restored from the checkpoint")
            _note_base(self._folder, saved)
        elif noted is None and self._folder.reference.exists():
            self._warn(f"{self._folder.reference} is damaged; it is written again from the model's files")
        return saved or noted or ""


def noted_base(folder: RunFolder) -> str | None:
    """Return the number of the starting model that the run's folder has, or None if the file is missing or damaged."""
    try:
        base = json.loads(folder.reference.read_bytes())["base"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return base if isinstance(base, str) and re.fullmatch(rf"[0-9a-f]{{{BASE_DIGITS}}}", base) else None


def _note_base(folder: RunFolder, base: str) -> None:
    atomic_write(folder.reference, json.dumps({"base": base}) + "\n")


def read_said(path: Path, pairs: int) -> Said | None:
    """What a file holds; None if there is none, ValueError if it is not as it was written."""
    try:
        head, _, content = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    about = json.loads(head)
    if not isinstance(about, dict) or about.get("sha256") != hashlib.sha256(content).hexdigest():
        raise ValueError("its checksum differs")
    if about.get("pairs") != pairs:
        raise ValueError(f"it is about {about.get('pairs')} pairs, and the data has {pairs}")
    return np.frombuffer(content, "<f4").reshape(-1, 2).astype(np.float32)


def write_said(path: Path, said: Said) -> None:
    """Whole or not at all."""
    content = said.astype("<f4").tobytes()
    about = {"format": FORMAT, "pairs": len(said), "sha256": hashlib.sha256(content).hexdigest()}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(about).encode() + b"\n" + content)


def _of_first_host(array: NDArray[Any]) -> NDArray[Any]:
    """What host 0 knows, all know: else they would compute different rests."""
    if jax.process_count() == 1:
        return array
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return np.array(broadcast_one_to_all(array))


def _shown(phase: Phase, worker: Worker, done: int, of: int, left_seconds: float) -> None:
    worker.pulse.phase(FOLDER)
    phase.detail = f"{done / of:.0%} of {of} rows" + (f"  eta {Seconds(left_seconds)}" if done < of else "")
