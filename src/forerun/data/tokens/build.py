"""Building of a store: worker processes build the units, and an index is written when all units exist.

Any process may be killed at any time and started again, on any number of machines that share the folder or the bucket.
This is safe because the bytes of a unit depend only on the data and the recipe, and because one rename, or one object
of a bucket, makes a unit visible (`unit.py`).

The hosts of a run share the work on a store in a bucket. Host i of n builds the units u with u % n == i and waits for
the others. If no unit is added for longer than a unit can take, a host builds the missing units itself. This is
wasteful but safe, because all hosts write the same bytes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from forerun.data import checked_json
from forerun.data.source.rows import BadRow
from forerun.data.source.sources import Source
from forerun.data.tokens.memory import no_memory
from forerun.data.tokens.recipe import FORMAT, Recipe
from forerun.data.tokens.store import INDEX, index_entry, read_index
from forerun.data.tokens.unit import (
    Unit,
    bad_from,
    listed_units,
    read_skipped,
    remove_leftovers,
    storage_error,
    summaries_of,
    summary_of,
    unit_name,
    units_of,
)
from forerun.data.tokens.worker_pool import ATTEMPTS, Event, Pool, StartEngine, UnitEngine
from forerun.errors import StorageError, UserError
from forerun.progress import TaskSpeed
from forerun.storage.folder import Folder
from forerun.storage.open_folder import folder_at
from forerun.units import Bytes, Count, Seconds


@dataclass(frozen=True)
class Limits:
    """Limits on what may be skipped. `rows` is a share of bad rows if below 1, else a number. `files` is a number."""

    rows: float = 0.0
    files: int = 0

    def check(self, store: Path | Folder, units: Iterable[dict[str, Any]], *, whole: bool) -> None:
        """Raise UserError if `units` have more bad rows or damaged files than allowed.

        `units` are the summaries of all units (`whole`) or of the first ones. A share is only checked for all units,
        a number also for the first ones.
        """
        rows = bad = 0
        names: list[str] = []  # of units with a record
        damaged: dict[str, None] = {}
        for unit in units:
            rows, bad = rows + unit["rows"], bad + unit["bad"]
            damaged |= dict.fromkeys(unit["bad_files"])
            names += [unit_name(unit["unit"], unit["of"])] if unit["bad"] or unit["bad_files"] else []
        if len(damaged) > self.files:
            faults = (bad for bad in read_skipped(store, names) if bad.whole_file)
            raise self._too_many(faults, len(damaged), None, "file", "are damaged", "bad_files", self.files)
        allowed = self.rows * rows if self.rows < 1 else self.rows
        if bad > allowed and (whole or not 0 < self.rows < 1):
            faults = (bad for bad in read_skipped(store, names) if not bad.whole_file)
            raise self._too_many(faults, bad, rows, "row", "are bad", "bad_rows", self.rows)

    def _too_many(
        self, faults: Iterable[BadRow], many: int, of: int | None, word: str, verb: str, key: str, limit: float
    ) -> UserError:
        """Return the error for too many bad rows or files. With a limit of 0 it is the error of the first one."""
        first = list(islice(faults, 3))
        if limit == 0:
            return stopped(first[0])
        among = "" if of is None else f" of {of}"
        return UserError(
            "E-DATA-103",
            f"{many}{among} {word}s {verb}, and data.{key} allows {_number(limit)}",
            why="\n".join([f"{bad.place}: {bad.what}" for bad in first] + ["..."] * (many > 3)),
            fix=f"fix them, or skip them: data.{key}={many}",
        )


def stopped(bad: BadRow) -> UserError:
    """Return the error for a bad row that ends the build. Its fix names the key that allows such rows."""
    error = bad.error()
    key = "bad_files" if bad.whole_file else "bad_rows"
    if f"data.{key}" not in error.fix:
        error.fix += f"; to skip such {key.removeprefix('bad_')}: data.{key}=N"
    return error


def _number(limit: float) -> str:
    return f"{limit:.3g} of them" if limit < 1 else f"{limit:.0f}"


POLL_SECONDS = 5.0
LISTING_SHARE = 0.1  # of the waiting time; listing a store of 52,000 units takes seconds
PATIENCE_SECONDS = 60.0
SLOW_BYTES_PER_SECOND = 1e6  # a worker that tokenizes at this speed is slow


def missing_after_waiting(
    store: Folder,
    units: Sequence[Unit],
    is_complete: Callable[[], bool],
    *,
    first: bool,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Unit] | None:
    """Wait until other hosts have finished the store. Return None if they have, else the units to build here.

    Args:
        store: The store.
        units: All units of the store.
        is_complete: Returns whether the index exists.
        first: Whether this is the host that writes the index. Another one does so only if the index is late.
        sleep: Waits for a number of seconds.
        clock: Returns the time in seconds.

    Returns:
        None if the store is complete. An empty list if all units exist and this host must write the index.
    """
    known, changed = -1, clock()
    while not is_complete():
        began = clock()
        names = listed_units(store)
        missing = [unit for unit in units if unit.name not in names]
        now = clock()
        if len(missing) != known:
            known, changed = len(missing), now
        if not missing and (first or now - changed > PATIENCE_SECONDS):
            return []
        largest = max((unit.size_bytes for unit in missing), default=0)
        if missing and now - changed > PATIENCE_SECONDS + largest / SLOW_BYTES_PER_SECOND:
            return missing
        sleep(max(POLL_SECONDS, (now - began) / LISTING_SHARE))
    return None


__all__ = ["BuildProgress", "Limits", "build", "is_complete"]


@dataclass(frozen=True)
class BuildProgress:
    """The progress of a build. Bytes are those of the source files."""

    done_bytes: int
    total_bytes: int
    documents: int
    tokens: int
    units_done: int
    units: int
    eta_seconds: float | None  # None: not known yet

    def text(self, name: str) -> str:
        """Return a line about the progress of the part `name` of the data."""
        share = self.done_bytes / max(1, self.total_bytes)
        eta = "" if self.eta_seconds is None else f"  eta {Seconds(self.eta_seconds)}"
        return f"tokenizing {name}: {share:.0%} of {Bytes(self.total_bytes)}  {Count(self.tokens)} tokens{eta}"


Place = TypeVar("Place", Path, Folder)


def build(
    source: Source,
    recipe: Recipe,
    root: Place,
    *,
    workers: int | None = None,
    shard: tuple[int, int] = (0, 1),
    limits: Limits | None = None,
    on_unit: Callable[[BuildProgress], None] | None = None,
    engine: StartEngine = Pool,
    host: tuple[int, int] = (0, 1),
) -> Place:
    """Build the store of `source`, unless it exists, and return its folder.

    Args:
        source: The rows to tokenize.
        recipe: How rows become tokens.
        root: The folder of all stores, as a path or as a folder that may be in a bucket. The name of a store is the
            key of its recipe and source.
        workers: Number of worker processes, by default one per core; on a cluster, of units at the same time.
        shard: (i, n) builds only the units u with u % n == i. The process that finds all units finished writes the
            index, so the result may be a store for which `is_complete` is still false.
        limits: How many bad rows and damaged files may be skipped, by default none.
        on_unit: Called with the progress of the build.
        engine: Starts what builds the units, by default worker processes of this machine.
        host: (i, n) for host i of the n hosts of a run. They share the work on a store in a bucket, and wait for each
            other. On a local disk, each host builds all units.

    Returns:
        The folder of the store, as a path if `root` is one.

    Raises:
        UserError: A row or file is bad and not allowed, a worker fails repeatedly, or the store cannot be written.
            Finished units are kept.
    """
    limits = limits or Limits()
    store = folder_at(root).inside(recipe.key(source))
    found = Path(store.address) if isinstance(root, Path) else store
    if is_complete(store):
        held = read_index(store)["units"]
        # Nothing removes units from a bucket, and listing a large one takes long, so its index is trusted.
        if not store.is_local or {unit_name(unit["unit"], unit["of"]) for unit in held} <= set(store.names()):
            limits.check(store, held, whole=True)
            return found
    units = units_of(source)
    try:
        store.require_writable()
        remove_leftovers(store)
        shares = [shard] if store.is_local else [shard, host]
        mine: list[Unit] | None = [unit for unit in units if all(unit.number % n == i for i, n in shares)]
        while mine is not None:
            _Build(store, source, recipe, units, mine, limits, on_unit).run(engine, workers)
            alone = store.is_local or host[1] == 1 or shard[1] > 1
            mine = (
                None if alone else missing_after_waiting(store, units, partial(is_complete, store), first=not host[0])
            )
    except OSError as error:
        raise storage_error(store, error) from error
    return found


def is_complete(store: Path | Folder) -> bool:
    """Return whether a store is complete: all units exist and the index is written."""
    return folder_at(store).exists(INDEX)


class _Build:
    """One build of a store, or of some of its units."""

    def __init__(
        self,
        store: Folder,
        source: Source,
        recipe: Recipe,
        units: Sequence[Unit],
        mine: Sequence[Unit],
        limits: Limits,
        on_unit: Callable[[BuildProgress], None] | None,
    ) -> None:
        self._store, self._source, self._recipe, self._units = store, source, recipe, units
        self._limits, self._on_unit = limits, on_unit
        self._mine = mine
        self._summaries: dict[int, dict[str, Any]] = {}
        self._failed: dict[int, Exception] = {}
        self._counts = _BuildCounts(sum(unit.size_bytes for unit in self._mine))

    def run(self, start: StartEngine, workers: int | None) -> None:
        """Build the missing units, check the limits, and write the index if all units exist."""
        waiting = self._missing()
        self._counts.begin()
        self._report()
        if waiting:
            engine = start(waiting, self._task(), workers)
            for event in engine.events():
                self._handle(event, engine)
            remove_leftovers(self._store)  # temporary folders of workers that died
        if self._failed:
            raise self._failed[min(self._failed)]
        self._limits.check(self._store, self._in_order(self._mine), whole=False)
        self._merge()
        self._report()

    def _task(self) -> dict[str, Any]:
        """Return the task for the workers, in types of JSON."""
        return {
            "source": self._source.to_json(),
            "recipe": self._recipe.to_json(),
            "store": self._store.address if not self._store.is_local else str(Path(self._store.address).absolute()),
            "rows_stop": self._limits.rows == 0,
            "files_stop": self._limits.files == 0,
        }

    def _missing(self) -> list[Unit]:
        """Count the finished units of this build, and return the others."""
        if self._store.is_local:
            return [unit for unit in self._mine if not self._collect(unit)]
        for number, summary in self._finished(self._mine):
            self._count(self._units[number], summary)
        return [unit for unit in self._mine if unit.number not in self._summaries]

    def _finished(self, units: Sequence[Unit]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the numbers and summaries of those units that are finished."""
        numbers = {unit.name: unit.number for unit in units}
        return ((numbers[name], summary) for name, summary in summaries_of(self._store, list(numbers)))

    def _collect(self, unit: Unit) -> bool:
        """Return whether the unit is finished, and count it if it is. Remove a damaged unit of a folder."""
        summary = summary_of(self._store, unit.name)
        if summary is None and self._store.is_local and (Path(self._store.address) / unit.name).exists():
            summary = summary_of(self._store, unit.name)  # again: another build may have finished it since
            if summary is None:
                self._store.remove(unit.name)
        if summary is None:
            return False
        self._count(unit, summary)
        return True

    def _count(self, unit: Unit, summary: dict[str, Any]) -> None:
        self._summaries[unit.number] = summary
        sides = summary["sides"].values()
        self._counts.finished(unit, sum(side["documents"] for side in sides), sum(side["tokens"] for side in sides))

    def _handle(self, event: Event, engine: UnitEngine) -> None:
        """Handle an event of the engine and report the progress."""
        unit = event.unit
        if event.kind == "progress":
            self._counts.working(unit, **event.content)
        elif event.kind == "done":
            if not self._collect(unit):
                self._fail(unit, engine, RuntimeError(f"a worker reported {unit.name} as done, but it is missing"))
            else:
                self._stop_if_exceeded(unit, engine)
        elif event.kind == "bad":
            self._fail(unit, engine, stopped(bad_from(event.content)))
        elif event.kind == "error":
            self._fail(unit, engine, UserError(**event.content))
        elif event.kind == "storage":
            self._fail(unit, engine, StorageError(**event.content))
        elif event.kind == "died":
            self._fail(unit, engine, self._death_error(unit, event.content))
        else:
            self._fail(unit, engine, self._bug(unit, event.content))
        self._report()

    def _fail(self, unit: Unit, engine: UnitEngine, error: Exception) -> None:
        """Record the failure of a unit, and build only the units before it.

        The earliest failure in the order of the data is raised in the end, so the error does not depend on timing.
        """
        self._failed[unit.number] = error
        engine.up_to(unit)

    def _stop_if_exceeded(self, unit: Unit, engine: UnitEngine) -> None:
        """Stop the build early if the finished units at the start of the data already exceed the limits."""
        beginning = []
        for one in self._mine:
            if one.number not in self._summaries:
                break
            beginning.append(one)
            try:
                summary = self._summaries[one.number]
                if one.number >= unit.number and (summary["bad"] or summary["bad_files"]):
                    self._limits.check(self._store, self._in_order(beginning), whole=False)
            except UserError as error:
                self._fail(one, engine, error)
                return

    def _in_order(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        return [self._summaries[unit.number] for unit in units]

    def _files(self, unit: Unit) -> str:
        """Return the names of the first and the last file of a unit, for errors."""
        names = [str(self._source.files[piece.file].name) for piece in unit.pieces]
        return names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"

    def _bug(self, unit: Unit, content: dict[str, Any]) -> RuntimeError:
        where = content["where"] or f"{unit.name} ({self._files(unit)})"
        return RuntimeError(f"{content['error']}\nin a tokenization worker at {where}\n{content['trace']}".rstrip())

    def _death_error(self, unit: Unit, content: dict[str, Any]) -> UserError:
        """Return the error for a worker that ended without an answer. Only SIGKILL suggests that memory ran out."""
        files, code, said = self._files(unit), content["code"], content["said"]
        if content["no_memory"]:
            return no_memory(files)
        last = (said.strip().splitlines() or [""])[-1]
        what = f"a worker died {ATTEMPTS} times at {unit.name} ({files})"
        if code == -signal.SIGKILL:
            why = f"signal {-code}, which the system sends when memory runs out"
            return UserError(
                "E-DATA-086",
                what,
                why=why,
                fix="use fewer workers, which need less memory: data.workers=1; finished units are kept",
            )
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return UserError(
            "E-DATA-087",
            what,
            why=f"{how}; it printed nothing" if not last else f"{how}; the last line that it printed: {last}",
            fix="fix what that line names, then run the same command again; finished units are kept"
            if last
            else f"look for unusual documents in {files}, and report the error; finished units are kept",
        )

    def _merge(self) -> None:
        """Write the index if all units of all shards exist, then check the limits for the complete store."""
        others = [unit for unit in self._units if unit.number not in self._summaries]
        if others and not {unit.name for unit in others} <= listed_units(self._store):
            return
        found = self._summaries | (dict(self._finished(others)) if others else {})
        if len(found) < len(self._units):
            return
        units = [index_entry(found[unit.number]) for unit in self._units]
        index = {"format": FORMAT, "recipe": self._recipe.settings(), "source": self._source.recognised, "units": units}
        self._store.replace(INDEX, checked_json.encode(index))
        self._limits.check(self._store, units, whole=True)

    def _report(self) -> None:
        if self._on_unit is not None:
            self._on_unit(self._counts.progress(len(self._summaries), len(self._mine)))


class _BuildCounts:
    """Counts of bytes, documents and tokens of a build, and its remaining time."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = self._documents = self._tokens = 0
        self._working: dict[int, tuple[int, int, int]] = {}
        self._pace = TaskSpeed(total_bytes)

    def begin(self) -> None:
        """Start to measure speed. Units that exist already are not counted as work of this build."""
        self._pace = TaskSpeed(self._total_bytes, self._done_bytes)

    def working(self, unit: Unit, *, documents: int, tokens: int) -> None:
        # A worker does not know its position in the files. Four bytes per token are accurate enough for a bar.
        self._working[unit.number] = (min(4 * tokens, unit.size_bytes * 99 // 100), documents, tokens)

    def finished(self, unit: Unit, documents: int, tokens: int) -> None:
        self._working.pop(unit.number, None)
        self._done_bytes += unit.size_bytes
        self._documents += documents
        self._tokens += tokens

    def progress(self, units_done: int, units: int) -> BuildProgress:
        size, documents, tokens = (sum(column) for column in zip((0, 0, 0), *self._working.values(), strict=True))
        done = self._done_bytes + size
        self._pace.done = done
        eta = self._pace.eta_seconds()
        return BuildProgress(
            done, self._total_bytes, self._documents + documents, self._tokens + tokens, units_done, units, eta
        )
