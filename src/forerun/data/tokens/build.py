"""Building a store: units in worker processes, kept when they are whole, merged by an index when all are there.

Anything may be killed at any time and started again, on any number of machines that see the same folder: a unit's
bytes depend on the data and the recipe only, and it appears in one rename.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.data import checked_json
from forerun.data.source.sources import Source
from forerun.data.tokens.memory import no_memory
from forerun.data.tokens.policy import Limits, bad_from, stopped
from forerun.data.tokens.pool import ATTEMPTS, Event, Pool
from forerun.data.tokens.recipe import FORMAT, Recipe
from forerun.data.tokens.store import INDEX, index_entry, read_index
from forerun.data.tokens.unit import Unit, no_room, remove_leftovers, summary_of, unit_name, units_of
from forerun.errors import StorageError, UserError
from forerun.files import atomic_write

__all__ = ["Limits", "Progress", "build", "is_whole"]


@dataclass(frozen=True)
class Progress:
    """How far a build is; bytes are those of the files."""

    done_bytes: int
    total_bytes: int
    documents: int
    tokens: int
    units_done: int
    units: int
    eta_seconds: float | None  # None: too early to tell


Tell = Callable[[Progress], None]


def build(
    source: Source,
    recipe: Recipe,
    root: Path,
    *,
    workers: int | None = None,
    shard: tuple[int, int] = (0, 1),
    limits: Limits | None = None,
    progress: Tell | None = None,
) -> Path:
    """The folder of the store of `source`, built if it is not there.

    `shard` (i, n) builds the units u with u % n == i. Whoever finds all units there writes the index (`is_whole`).
    """
    limits = limits or Limits()
    store = root / recipe.key(source)
    if is_whole(store):
        held = read_index(store)["units"]
        if {unit_name(unit["unit"], unit["of"]) for unit in held} <= set(os.listdir(store)):
            limits.check(store, held, whole=True)
            return store
    units = units_of(source)
    try:
        store.mkdir(parents=True, exist_ok=True)
        remove_leftovers(store)
        _Build(store, source, recipe, units, shard, limits, progress).run(workers or _cores())
    except OSError as error:
        raise no_room(store, error) from error
    return store


def is_whole(store: Path) -> bool:
    """Every unit is there and the index is written."""
    return (store / INDEX).exists()


class _Build:
    def __init__(
        self,
        store: Path,
        source: Source,
        recipe: Recipe,
        units: Sequence[Unit],
        shard: tuple[int, int],
        limits: Limits,
        tell: Tell | None,
    ) -> None:
        self._store, self._source, self._recipe, self._units = store, source, recipe, units
        self._limits, self._tell = limits, tell
        self._mine = [unit for unit in units if unit.number % shard[1] == shard[0]]
        self._summaries: dict[int, dict[str, Any]] = {}
        self._failed: dict[int, Exception] = {}
        self._pace = _Pace(sum(unit.size_bytes for unit in self._mine))

    def run(self, workers: int) -> None:
        waiting = [unit for unit in self._mine if not self._take(unit)]
        self._pace.begin()
        self._report()
        if waiting:
            pool = Pool(waiting, self._task(), workers)
            for event in pool.events():
                self._hear(event, pool)
            remove_leftovers(self._store)  # of workers that died
        if self._failed:
            raise self._failed[min(self._failed)]
        self._limits.check(self._store, self._in_order(self._mine), whole=False)
        self._merge()
        self._report()

    def _task(self) -> dict[str, Any]:
        return {
            "source": self._source.to_json(),
            "recipe": self._recipe.to_json(),
            "store": str(self._store.absolute()),
            "rows_stop": self._limits.rows == 0,
            "files_stop": self._limits.files == 0,
        }

    def _take(self, unit: Unit) -> bool:
        """Whether the unit is there, whole; what is damaged is taken away."""
        summary = summary_of(self._store, unit.name)
        if summary is None and (self._store / unit.name).exists():
            summary = summary_of(self._store, unit.name)  # again: another build may have put it there since, whole
            if summary is None:
                shutil.rmtree(self._store / unit.name)
        if summary is None:
            return False
        self._summaries[unit.number] = summary
        sides = summary["sides"].values()
        self._pace.finished(unit, sum(side["documents"] for side in sides), sum(side["tokens"] for side in sides))
        return True

    def _hear(self, event: Event, pool: Pool) -> None:
        unit = event.unit
        if event.kind == "progress":
            self._pace.working(unit, **event.content)
        elif event.kind == "done":
            if not self._take(unit):
                self._fail(unit, pool, RuntimeError(f"{unit.name} is not there, though a worker says so"))
            else:
                self._look(unit, pool)
        elif event.kind == "bad":
            self._fail(unit, pool, stopped(bad_from(event.content)))
        elif event.kind == "error":
            self._fail(unit, pool, UserError(**event.content))
        elif event.kind == "storage":
            self._fail(unit, pool, StorageError(**event.content))
        elif event.kind == "died":
            self._fail(unit, pool, self._dead(unit, event.content))
        else:
            self._fail(unit, pool, self._bug(unit, event.content))
        self._report()

    def _fail(self, unit: Unit, pool: Pool, error: Exception) -> None:
        """The earliest failure is the one that is told: units before it are still built."""
        self._failed[unit.number] = error
        pool.up_to(unit)

    def _look(self, unit: Unit, pool: Pool) -> None:
        """Ends the build early when the units of the beginning alone have too many bad rows."""
        beginning = []
        for one in self._mine:
            if one.number not in self._summaries:
                break
            beginning.append(one)
            try:
                if one.number >= unit.number and self._faulty(one):
                    self._limits.check(self._store, self._in_order(beginning), whole=False)
            except UserError as error:
                self._fail(one, pool, error)
                return

    def _faulty(self, unit: Unit) -> bool:
        return bool(self._summaries[unit.number]["bad"] or self._summaries[unit.number]["bad_files"])

    def _in_order(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        return [self._summaries[unit.number] for unit in units]

    def _files(self, unit: Unit) -> str:
        names = [str(self._source.files[piece.file].name) for piece in unit.pieces]
        return names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"

    def _bug(self, unit: Unit, content: dict[str, Any]) -> RuntimeError:
        where = content["where"] or f"{unit.name} ({self._files(unit)})"
        return RuntimeError(f"{content['error']}\nin a tokenization worker at {where}\n{content['trace']}".rstrip())

    def _dead(self, unit: Unit, content: dict[str, Any]) -> UserError:
        """Return the error for a worker that ended without an answer. Only SIGKILL suggests that memory ran out."""
        files, code, said = self._files(unit), content["code"], content["said"]
        if content["no_memory"]:
            return no_memory(files)
        last = (said.strip().splitlines() or [""])[-1]
        what = f"a worker died {ATTEMPTS} times at {unit.name} ({files})"
        if code == -signal.SIGKILL:
            why = f"signal {-code}, which is what the system does when memory runs out"
            return UserError(what, why=why, fix="fewer workers need less memory: data.workers=1; what is done is kept")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return UserError(
            what,
            why=f"{how}; it printed nothing" if not last else f"{how}; the last line that it printed: {last}",
            fix="fix what that line names, then run the same command again; what is done is kept"
            if last
            else f"look for what is special about {files}, and report it; what is done is kept",
        )

    def _merge(self) -> None:
        """The index, if every unit of every shard is there."""
        for unit in self._units:
            if unit.number not in self._summaries and not (self._store / unit.name).exists():
                return
        found = {
            unit.number: self._summaries.get(unit.number) or summary_of(self._store, unit.name) for unit in self._units
        }
        if any(summary is None for summary in found.values()):
            return
        units = [index_entry(summary) for summary in found.values() if summary is not None]
        index = {"format": FORMAT, "recipe": self._recipe.settings(), "source": self._source.recognised, "units": units}
        atomic_write(self._store / INDEX, checked_json.encode(index))
        self._limits.check(self._store, units, whole=True)

    def _report(self) -> None:
        if self._tell is not None:
            self._tell(self._pace.progress(len(self._summaries), len(self._mine)))


class _Pace:
    """Bytes, documents and tokens of this build, and when it will be done."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = self._documents = self._tokens = 0
        self._working: dict[int, tuple[int, int, int]] = {}
        self._before, self._start = 0, time.monotonic()

    def begin(self) -> None:
        """What is there now was not this build's work."""
        self._before, self._start = self._done_bytes, time.monotonic()

    def working(self, unit: Unit, *, documents: int, tokens: int) -> None:
        # Where a worker is in its files it cannot tell; a token of four bytes is near enough for a bar.
        self._working[unit.number] = (min(4 * tokens, unit.size_bytes * 99 // 100), documents, tokens)

    def finished(self, unit: Unit, documents: int, tokens: int) -> None:
        self._working.pop(unit.number, None)
        self._done_bytes += unit.size_bytes
        self._documents += documents
        self._tokens += tokens

    def progress(self, units_done: int, units: int) -> Progress:
        size, documents, tokens = (sum(column) for column in zip((0, 0, 0), *self._working.values(), strict=True))
        done = self._done_bytes + size
        new, seconds = done - self._before, time.monotonic() - self._start
        eta = seconds * (self._total_bytes - done) / new if new else None
        return Progress(
            done, self._total_bytes, self._documents + documents, self._tokens + tokens, units_done, units, eta
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
