"""`forerun cache`: run a teacher over every row once, and store its top logits."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.teacher_cache import Identity, Layout, TeacherShards, differences, read_manifest
from forerun.errors import UserError
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.devices import DeviceChoice, choose
from forerun.hardware.mesh import require_one_slice
from forerun.hardware.prices import cheapest
from forerun.hardware.slices import slice_count
from forerun.program.compiler_options import compile_lowered
from forerun.program.fingerprint import tree_fingerprint
from forerun.program.recording import READ, Recording, build_recording, cache_settings_of, recording_shape
from forerun.progress import TaskSpeed
from forerun.reporter import Reporter
from forerun.resolve.resolve_model import require_positions
from forerun.resolve.resolved_job import ResolvedJob
from forerun.resolve.teacher_targets import public_name, row_count, rows_digest
from forerun.resolve.tokenizer_checks import require_same_tokenizer
from forerun.run.compile_step import use_cache
from forerun.run.open_data import open_corpus_with_progress
from forerun.trained_model.base_weights import require_weights
from forerun.trained_model.load_model import pretrained_params
from forerun.units import Bytes, Count, Seconds, Usd

SAY_SECONDS = 10.0


@dataclass(frozen=True)
class TeacherCache:
    """A teacher cache that is complete on disk.

    Attributes:
      folder: the folder of the cache.
      layout: its rows, and the logits of each.
      shards: the number of shards that this call has written.
      seconds: the time of this call.
    """

    folder: Path
    layout: Layout
    shards: int
    seconds: Seconds

    def __str__(self) -> str:
        return (
            f"done: {self.layout.rows} rows, {Bytes(self.layout.total_bytes)} in {self.folder}; "
            f"{self.shards} of {self.layout.shards} shards were written now, in {self.seconds}"
        )


def write_cache(resolved: ResolvedJob, reporter: Reporter) -> TeacherCache:
    """Create the teacher cache of a job, or complete one that exists. Damaged shards are computed again."""
    job, folder = resolved.job, require_folder(resolved.job)
    use_cache()
    chosen = choose(job.device, job.devices)
    reporter.info(f"device: {chosen.reason}")
    require_one_host()

    # Data and teacher: the rows that the student will see. Both models must have the same tokenizer.
    corpus = open_corpus_with_progress(resolved, reporter)
    resolved = resolved.with_data(corpus)
    teacher = resolved.teacher
    assert teacher is not None, "`require_folder` rejects a job without a teacher"
    require_weights(teacher)
    require_positions(job.sequence, teacher)
    require_same_tokenizer(teacher, corpus.tokenizer)
    layout = layout_of(resolved, corpus)
    reporter.info(f"cache: {described(layout)}, in {folder}")

    # Program and weights.
    require_one_slice(slice_count(chosen.devices), "this machine")
    program = build_recording(resolved, recording_shape(len(chosen.devices)), chosen.devices)
    with reporter.phase("compile"):
        run = compile_lowered(program.trace().lower(), program.compiler_options)
    with reporter.phase("teacher", str(teacher.section.name)):
        params = pretrained_params(teacher, program.params)
        number = weights_number(program, params)
    identity = Identity(
        rows_digest(corpus), corpus.tokenizer.name, public_name(teacher), number, job.precision.compute, layout
    )

    # Shards: compute the missing ones in order.
    with alone_in(folder):
        shards = opened(folder, identity, reporter)
        began, missing = time.monotonic(), shards.missing
        if missing:
            said = Saying(run, params, program, corpus)
            progress = CacheProgress(layout, missing, reporter)
            progress.announce(said.at_a_time, said.measured_seconds(), chosen)
            for shard in missing:
                shards.write(shard, (layout.packed(*row) for row in said.rows(layout.rows_of(shard), progress)))
    return TeacherCache(folder, layout, len(missing), Seconds(time.monotonic() - began))


def require_folder(job: Job) -> Path:
    """Return the folder of the job's cache. Raise if the job has no teacher or no cache."""
    teacher = job.method.teacher
    if teacher is None:
        raise UserError(
            "E-RUN-005",
            "the job has no teacher",
            why="forerun cache stores the logits of the model that distil.teacher names",
            fix="add to the job: distil: {teacher: owner/name, cache: teacher-cache}",
        )
    if teacher.cache is None:
        raise UserError(
            "E-RUN-006",
            "distil.cache names no folder",
            why="without it the teacher runs in every step, and nothing is stored",
            fix="distil.cache=FOLDER",
        )
    return Path(teacher.cache)


def require_one_host() -> None:
    """Raise if jax runs on several hosts."""
    if jax.process_count() > 1:
        raise UserError(
            "E-RUN-007",
            f"forerun cache runs on one host, and jax sees {jax.process_count()}",
            why="one process writes the cache, with all devices of its host",
            fix="run it on one machine, with distil.cache in a folder that all training hosts can read",
        )


def layout_of(resolved: ResolvedJob, corpus: Corpus) -> Layout:
    """Return the layout of the cached logits: which rows, how many logits of each, and at which temperatures."""
    common, top_k, temperatures = cache_settings_of(resolved)
    return Layout(row_count(corpus), resolved.job.sequence, top_k, common, temperatures)


def described(layout: Layout) -> str:
    """Return rows, logits and bytes of a cache in one line."""
    per_token = layout.row_bytes / layout.sequence
    return (
        f"{layout.rows} rows x {layout.sequence} tokens x {layout.top_k} of {layout.vocab} logits = "
        f"{Bytes(layout.total_bytes)} ({per_token:.0f} bytes a token) in {layout.shards} shards"
    )


def weights_number(program: Recording, params: Any) -> str:
    """Return a fingerprint of the teacher's weights, which is the same on every mesh."""

    with jax.set_mesh(program.mesh):
        return f"{int(jax.jit(tree_fingerprint)(params)):08x}"


def opened(folder: Path, identity: Identity, reporter: Reporter) -> TeacherShards:
    """Open the existing shards. Damaged ones count as missing.

    Raises:
      UserError: The folder has the cache of another teacher, other data or another layout.
    """
    found = read_manifest(folder)
    if found is not None and (other := [*differences(found.identity, identity)]):
        raise UserError(
            "E-RUN-008",
            f"{folder} holds another cache",
            why="\n".join(other),
            fix=f"distil.cache=OTHER_FOLDER, or remove {folder}",
        )
    shards = found or TeacherShards(folder, identity)
    for shard in shards.forget_damaged():
        reporter.warn(f"{shards.file(shard)} is damaged or missing: it is computed again")
    shards.require_disk_space()
    shards.begin()
    return shards


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder: two writers would overwrite each other's unfinished files."""
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(
            "E-RUN-009",
            f"another forerun cache is running in {folder}",
            why="its lock is held",
            fix="wait until it ends; this command then continues from its shards",
        ) from None
    finally:
        os.close(number)


class Saying:
    """The compiled teacher. Computes the logits of rows by their numbers."""

    def __init__(self, run: Callable[..., Any], params: Any, program: Recording, corpus: Corpus) -> None:
        self._run, self._params, self._program = run, params, program
        self._learned, self._kept = corpus.rows, corpus.kept

    @property
    def at_a_time(self) -> int:
        """The number of rows of one batch."""
        return int(self._program.rows["tokens"].shape[0])

    def measured_seconds(self) -> float:
        """Return the time of one batch. The first batch is not measured, because it includes one-time work."""
        numbers = np.resize(np.arange(len(self._learned)), self.at_a_time)
        seconds = 0.0
        for _ in range(2):
            began = time.perf_counter()
            jax.block_until_ready(self._ask(numbers))
            seconds = time.perf_counter() - began
        return seconds

    def rows(self, numbers: range, progress: CacheProgress) -> Iterator[tuple[NDArray[Any], ...]]:
        """Yield the logits of each row in order. The next batch is computed while one is written."""
        waiting: list[tuple[int, Any]] = []
        for start in range(numbers.start, numbers.stop, self.at_a_time):
            mine = np.arange(start, min(start + self.at_a_time, numbers.stop))
            waiting.append((len(mine), self._ask(np.resize(mine, self.at_a_time))))
            if len(waiting) > 1:
                yield from self._told(*waiting.pop(0), progress)
        for last in waiting:
            yield from self._told(*last, progress)

    def _told(self, count: int, answer: Any, progress: CacheProgress) -> Iterator[tuple[NDArray[Any], ...]]:
        arrays = [np.asarray(one) for one in jax.device_get(answer)]
        progress.done(count)
        yield from (tuple(array[n] for array in arrays) for n in range(count))

    def _ask(self, numbers: NDArray[np.int64]) -> Any:
        arrays = self._taken(numbers)
        rows = {name: jax.device_put(arrays[name], self._program.rows[name].sharding) for name in READ}
        return self._run(self._params, rows)

    def _taken(self, numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        learned = numbers < len(self._learned)
        if learned.all():
            return self._learned.take(numbers)
        assert self._kept is not None
        if not learned.any():
            return self._kept.take(numbers - len(self._learned))
        parts = self._learned.take(numbers[learned]), self._kept.take(numbers[~learned] - len(self._learned))
        out = {name: np.empty((len(numbers), *array.shape[1:]), array.dtype) for name, array in parts[0].items()}
        for name, whole in out.items():
            whole[learned], whole[~learned] = parts[0][name], parts[1][name]
        return out


class CacheProgress:
    """Reports the expected time and cost before the first shard, and the progress every few seconds."""

    def __init__(self, layout: Layout, missing: list[int], reporter: Reporter) -> None:
        self._layout, self._reporter = layout, reporter
        self._rows = sum(len(layout.rows_of(shard)) for shard in missing)
        self._pace, self._said = TaskSpeed(self._rows), time.monotonic()
        done = layout.rows - self._rows
        if done:
            reporter.info(f"cache: resumes, {done} of {layout.rows} rows are complete")

    def announce(self, at_a_time: int, batch_seconds: float, chosen: DeviceChoice) -> None:
        """Print the expected time and cost of the missing rows."""
        seconds = batch_seconds * -(-self._rows // at_a_time)
        tokens = at_a_time * self._layout.sequence / batch_seconds
        self._reporter.info(
            f"cache: about {Seconds(seconds)} at {Count(round(tokens))} tokens/s, {price_of(chosen, seconds)}"
        )
        self._pace, self._said = TaskSpeed(self._rows), time.monotonic()

    def done(self, rows: int) -> None:
        """Count finished rows, and print the progress every few seconds."""
        self._pace.done += rows
        now = time.monotonic()
        if now - self._said > SAY_SECONDS and self._pace.done < self._rows:
            self._said = now
            share, eta = self._pace.done / self._rows, self._pace.eta_seconds()
            self._reporter.info(f"cache: {share:.0%} of {self._rows} rows, eta {eta}")


def price_of(chosen: DeviceChoice, seconds: float) -> str:
    """Return the cost at the list price of these chips as text, or that no price is known."""
    chip = chip_of_device_kind(chosen.devices[0].device_kind)
    price = cheapest(chip.name) if chip and chip.bf16_flops is not None else None
    if chip is None or price is None:
        return "no price is known for this device"
    chips = len(chosen.devices) / max(1, chip.devices_per_chip)
    usd = seconds / 3600 * chips * price.usd_per_chip_hour_on_demand
    return f"{Usd(usd)} at the list price of {price.date} in {price.place}"
