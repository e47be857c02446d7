"""`forerun cache`, from top to bottom: a teacher reads every row once, and what it says is written down."""

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
from forerun.data.taught.layout import Layout
from forerun.data.taught.shards import Identity, Shards, differences, read_manifest
from forerun.errors import UserError
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.devices import Chosen, choose
from forerun.hardware.prices import cheapest
from forerun.loop.compilation import use_cache
from forerun.loop.concrete import concrete, require_positions
from forerun.loop.corpus import model_vocab, shown_corpus
from forerun.loop.given import require_weights
from forerun.loop.loaded import pretrained_params
from forerun.loop.taught import public_name, row_count, rows_digest
from forerun.loop.vocabulary import require_same_tokenizer
from forerun.models.base import Model
from forerun.models.registry import model_of
from forerun.models.teacher import teacher_section
from forerun.program.build import make_mesh
from forerun.program.fingerprint import whole_fingerprint
from forerun.program.recording import READ, Recording, build_recording, kept_of, recording_shape
from forerun.track.display import Display
from forerun.units import Bytes, Count, Seconds, Usd

SAY_SECONDS = 10.0


@dataclass(frozen=True)
class Written:
    folder: Path
    layout: Layout
    shards: int  # that this call has written
    seconds: Seconds


def cache(job: Job, display: Display) -> Written:
    """Make the job's cache, or go on with it, or mend it; nothing to do is no error."""
    folder = require_folder(job)
    use_cache()
    chosen = choose(job.device, job.devices)
    display.say(f"device: {chosen.reason}")
    require_one_host()

    # Data and teacher: the same rows that a student will see, in tokens that both understand.
    corpus = shown_corpus(job, display)
    job = concrete(job, corpus)
    section = require_weights(teacher_section(job))
    require_positions(job, section)
    require_same_tokenizer(job, corpus.tokenizer)
    teacher, vocab = model_of(section), model_vocab(job)
    assert vocab is not None, "the job is concrete"
    layout = layout_of(job, corpus, teacher, vocab)
    display.say(f"cache: {described(layout)}, in {folder}")

    # Program and weights.
    shape = recording_shape(len(chosen.devices))
    program = build_recording(job, teacher, vocab, make_mesh(shape, chosen.devices), shape)
    with display.phase("compile"):
        run = program.trace().lower().compile(compiler_options=program.compiler_options or None)
    with display.phase("teacher", str(section.name)):
        params = pretrained_params(section, program.params)
        number = weights_number(program, params)
    identity = Identity(
        rows_digest(corpus), corpus.tokenizer.name, public_name(job), number, job.precision.compute, layout
    )

    # Shards: those that are missing, one after the other.
    with alone_in(folder):
        shards = opened(folder, identity, display)
        began, missing = time.monotonic(), shards.missing
        if missing:
            said = Saying(run, params, program, corpus)
            progress = Progress(layout, missing, display)
            progress.announce(said.at_a_time, said.measured_seconds(), chosen)
            for shard in missing:
                shards.write(shard, (layout.packed(*row) for row in said.rows(layout.rows_of(shard), progress)))
    return Written(folder, layout, len(missing), Seconds(time.monotonic() - began))


def require_folder(job: Job) -> Path:
    if job.distil is None:
        raise UserError(
            "the job has no teacher",
            why="forerun cache writes down what the teacher of distil.teacher says",
            fix="add to the job: distil: {teacher: owner/name, cache: teacher-cache}",
        )
    if job.distil.cache is None:
        raise UserError(
            "distil.cache names no folder",
            why="without it the teacher runs in every step, and nothing is written down",
            fix="distil.cache=FOLDER",
        )
    return Path(job.distil.cache)


def require_one_host() -> None:
    if jax.process_count() > 1:
        raise UserError(
            f"forerun cache runs on one host, and jax sees {jax.process_count()}",
            why="a teacher's words are written by one process, with all devices of its host",
            fix="run it on a machine of its own, into a folder that the hosts which train can read",
        )


def layout_of(job: Job, corpus: Corpus, teacher: Model, vocab: int) -> Layout:
    common, top_k, temperatures = kept_of(job, teacher, vocab)
    return Layout(row_count(corpus), job.sequence, top_k, common, temperatures)


def described(layout: Layout) -> str:
    per_token = layout.row_bytes / layout.sequence
    return (
        f"{layout.rows} rows x {layout.sequence} tokens x {layout.top_k} of {layout.vocab} logits = "
        f"{Bytes(layout.total_bytes)} ({per_token:.0f} bytes a token) in {layout.shards} shards"
    )


def weights_number(program: Recording, params: Any) -> str:
    """A number for the teacher's weights, the same on every mesh."""

    with jax.set_mesh(program.mesh):
        return f"{int(jax.jit(whole_fingerprint)(params)):08x}"


def opened(folder: Path, identity: Identity, display: Display) -> Shards:
    """The shards that are there, if they are of this teacher and these rows; damaged ones count as missing."""
    found = read_manifest(folder)
    if found is not None and (other := [*differences(found.identity, identity)]):
        raise UserError(
            f"{folder} holds another cache",
            why="\n".join(other),
            fix=f"distil.cache=OTHER_FOLDER, or remove {folder}",
        )
    shards = found or Shards(folder, identity)
    for shard in shards.forget_damaged():
        display.warn(f"{shards.file(shard)} is damaged or gone: it is made again")
    shards.require_room()
    shards.begin()
    return shards


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two writers in one folder would write into one another's drafts."""
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(
            f"another forerun cache is at work in {folder}",
            why="its lock is held",
            fix="wait for it; started again, this command finds what it has done",
        ) from None
    finally:
        os.close(number)


class Saying:
    """The teacher, asked for rows by number."""

    def __init__(self, run: Callable[..., Any], params: Any, program: Recording, corpus: Corpus) -> None:
        self._run, self._params, self._program = run, params, program
        self._learned, self._kept = corpus.rows, corpus.kept

    @property
    def at_a_time(self) -> int:
        return int(self._program.rows["tokens"].shape[0])

    def measured_seconds(self) -> float:
        """Of one batch, the first one thrown away."""
        numbers = np.resize(np.arange(len(self._learned)), self.at_a_time)
        seconds = 0.0
        for _ in range(2):
            began = time.perf_counter()
            jax.block_until_ready(self._ask(numbers))
            seconds = time.perf_counter() - began
        return seconds

    def rows(self, numbers: range, progress: Progress) -> Iterator[tuple[NDArray[Any], ...]]:
        """What it says of each row, in order. The next batch is computed while one is written."""
        waiting: list[tuple[int, Any]] = []
        for start in range(numbers.start, numbers.stop, self.at_a_time):
            mine = np.arange(start, min(start + self.at_a_time, numbers.stop))
            waiting.append((len(mine), self._ask(np.resize(mine, self.at_a_time))))
            if len(waiting) > 1:
                yield from self._told(*waiting.pop(0), progress)
        for last in waiting:
            yield from self._told(*last, progress)

    def _told(self, count: int, answer: Any, progress: Progress) -> Iterator[tuple[NDArray[Any], ...]]:
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


class Progress:
    """Says how long it will take and what it costs before the first shard, and where it is now and then."""

    def __init__(self, layout: Layout, missing: list[int], display: Display) -> None:
        self._layout, self._display = layout, display
        self._rows, self._at = sum(len(layout.rows_of(shard)) for shard in missing), 0
        self._began = self._said = time.monotonic()
        done = layout.rows - self._rows
        if done:
            display.say(f"cache: goes on, {done} of {layout.rows} rows are there")

    def announce(self, at_a_time: int, batch_seconds: float, chosen: Chosen) -> None:
        seconds = batch_seconds * -(-self._rows // at_a_time)
        tokens = at_a_time * self._layout.sequence / batch_seconds
        self._display.say(
            f"cache: about {Seconds(seconds)} at {Count(round(tokens))} tokens/s, {price_of(chosen, seconds)}"
        )
        self._began = self._said = time.monotonic()

    def done(self, rows: int) -> None:
        self._at += rows
        now = time.monotonic()
        if now - self._said > SAY_SECONDS and self._at < self._rows:
            self._said = now
            left = (now - self._began) / self._at * (self._rows - self._at)
            self._display.say(f"cache: {self._at / self._rows:.0%} of {self._rows} rows, eta {Seconds(left)}")


def price_of(chosen: Chosen, seconds: float) -> str:
    """At the list price of these chips, if there is one."""
    chip = chip_of_device_kind(chosen.devices[0].device_kind)
    price = cheapest(chip.name) if chip and chip.bf16_flops is not None else None
    if chip is None or price is None:
        return "no price is known for this device"
    chips = len(chosen.devices) / max(1, chip.devices_per_chip)
    usd = seconds / 3600 * chips * price.usd_per_chip_hour_on_demand
    return f"{Usd(usd)} at the list price of {price.date} in {price.zone}"
