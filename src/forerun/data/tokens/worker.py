"""The worker process that tokenizes units: `python -m forerun.data.tokens.worker`.

The worker reads JSON lines from stdin. The first line is the task (source, recipe, store, whether bad rows stop the
build), each further line is a unit. For each unit it writes JSON lines to stdout: `progress` while it works, then one
of `done`, `bad` (a row that stops the build), `error`, `storage` (the disk fails) and `bug`. It exits immediately when
stdin is closed, because its parent process has then ended.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from forerun.data.source.rows import BadRow, FilePiece, RowPlace, SourceRow
from forerun.data.source.sources import Source
from forerun.data.tokens.document import Encoded, Encoder
from forerun.data.tokens.memory import no_memory
from forerun.data.tokens.recipe import Recipe, is_validation
from forerun.data.tokens.unit import Unit, UnitWriter, bad_json, storage_error, summary_of
from forerun.errors import StorageError, UserError
from forerun.storage.folder import Folder
from forerun.storage.open_folder import folder_at

BATCH_ROWS = 500
BATCH_CHARACTERS = 1 << 20
PROGRESS_SECONDS = 0.5


class StoppedError(Exception):
    """An error for a bad row that stops the build. The row has its absolute place."""

    def __init__(self, bad: BadRow) -> None:
        super().__init__(bad.what)
        self.bad = bad


class RowFailedError(Exception):
    """An error for a row whose encoding failed for an unexpected reason. `place` is its absolute place."""

    def __init__(self, place: RowPlace) -> None:
        super().__init__(str(place))
        self.place = place


class TokenizeTask:
    """The task of a worker: building units of one source.

    With `rows_stop`, a bad row stops the build; with `files_stop`, a damaged file does. Otherwise they are skipped.
    """

    def __init__(self, source: Source, recipe: Recipe, store: Folder, *, rows_stop: bool, files_stop: bool) -> None:
        self._source, self._recipe, self.store = source, recipe, store
        self._rows_stop, self._files_stop = rows_stop, files_stop
        self._encoder = Encoder(recipe, source.form)

    def build(self, unit: Unit) -> Iterator[dict[str, int]]:
        """Build a unit, and yield its progress about every half second. Do nothing if the unit exists."""
        if summary_of(self.store, unit.name) is not None:
            return
        writer = UnitWriter(self.store, unit, self._recipe.vocab)
        last_report = time.monotonic()
        try:
            for piece in unit.pieces:
                places = _Places(self._source, piece)
                for batch in _batches(self._source.rows(piece)):
                    self._write(writer, batch, places)
                    if time.monotonic() - last_report > PROGRESS_SECONDS:
                        last_report = time.monotonic()
                        yield {"documents": writer.documents, "tokens": writer.tokens}
            writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def _write(self, writer: UnitWriter, batch: list[SourceRow | BadRow], places: _Places) -> None:
        """Encode a batch of rows and write its documents, each to the training or the validation side."""
        rows = [row for row in batch if isinstance(row, SourceRow)]
        try:
            encoded = iter(self._encoder.encode(rows))
        except (UserError, MemoryError, OSError):
            raise
        except Exception as error:
            raise RowFailedError(places.absolute_place(self._failing_row(rows).place)) from error
        sides: dict[str, list[Encoded]] = {"train": [], "validation": []}
        for row in batch:
            found = next(encoded) if isinstance(row, SourceRow) else row
            if isinstance(found, BadRow):
                bad = places.absolute(found)
                if self._files_stop if bad.whole_file else self._rows_stop:
                    raise StoppedError(bad)
                writer.skip(bad)
                continue
            assert isinstance(row, SourceRow)
            apart = self._recipe.validation > 0 and is_validation(row.values, self._recipe.validation)
            sides["validation" if apart else "train"].append(found)
        for side, documents in sides.items():
            writer.add(side, documents)

    def _failing_row(self, rows: list[SourceRow]) -> SourceRow:
        """Return the first row that cannot be encoded alone, or the first row if every row can."""
        for row in rows:
            try:
                self._encoder.encode([row])
            except Exception:
                return row
        return rows[0]


class _Places:
    """Converter of places inside a piece to absolute places.

    The rows before the piece are counted once, when the first place is converted.
    """

    def __init__(self, source: Source, piece: FilePiece) -> None:
        self._source, self._piece = source, piece
        self._before: int | None = None

    def absolute(self, bad: BadRow) -> BadRow:
        return replace(bad, place=self.absolute_place(bad.place))

    def absolute_place(self, place: RowPlace) -> RowPlace:
        if place.number is None:
            return place
        if self._before is None:
            first = self._source.resolve(self._piece, RowPlace(place.file, 1, place.word)).number
            self._before = 0 if first is None else first - 1
        return place._replace(number=place.number + self._before)


def _batches(rows: Iterator[SourceRow | BadRow]) -> Iterator[list[SourceRow | BadRow]]:
    """Yield the rows in lists of BATCH_ROWS rows, or fewer if they have BATCH_CHARACTERS characters."""
    batch: list[SourceRow | BadRow] = []
    characters = 0
    for row in rows:
        batch.append(row)
        if isinstance(row, SourceRow):
            characters += _length(row.values)
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _length(values: dict[str, Any]) -> int:
    """Return the approximate number of characters in a row."""
    held = list(values.values())
    all_messages = [message for one in held if isinstance(one, list) for message in one if isinstance(message, dict)]
    held += [message.get("content") for message in all_messages]
    return sum(len(value) for value in held if isinstance(value, str | list | np.ndarray))


def answers(work: TokenizeTask, unit: Unit) -> Iterator[dict[str, Any]]:
    """Yield the messages about one unit. The last one is done, bad, error, storage or bug."""
    try:
        for progress in work.build(unit):
            yield {"progress": progress}
        yield {"done": unit.number}
    except StoppedError as stopped:
        yield {"bad": bad_json(stopped.bad)}
    except UserError as error:
        yield _error_message(error)
    except MemoryError:
        yield _error_message(no_memory(f"unit {unit.name}"))
    except OSError as error:  # reading the data does not raise OSError, so the store failed
        yield _error_message(storage_error(work.store, error))
    except Exception as error:
        yield _bug(error)


def _bug(error: Exception) -> dict[str, Any]:
    """Return the message about an unexpected error: its place, type, text and traceback."""
    where = str(error.place) if isinstance(error, RowFailedError) else None
    cause = (error.__cause__ or error) if where else error
    trace = "".join(traceback.format_exception(cause))[-4000:]
    return {"bug": {"where": where, "error": f"{type(cause).__name__}: {cause}", "trace": trace}}


def _error_message(error: UserError) -> dict[str, Any]:
    """Return the message about an error that the user can correct."""
    kind = "storage" if isinstance(error, StorageError) else "error"
    return {kind: error.parts()}


def main() -> None:
    """Build units from stdin until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # texts that a library prints go to stderr, so that they cannot mix with the messages
    task = json.loads(sys.stdin.readline())
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    work: TokenizeTask | None = None
    while True:
        unit = Unit.from_json(json.loads(lines.get()))
        try:
            work = work or TokenizeTask(
                Source.from_json(task["source"]),
                Recipe.from_json(task["recipe"]),
                folder_at(task["store"]),
                rows_stop=task["rows_stop"],
                files_stop=task["files_stop"],
            )
        except UserError as error:
            print(json.dumps(_error_message(error)), file=out)
            continue
        except MemoryError:
            print(json.dumps(_error_message(no_memory("its own tables"))), file=out)
            continue
        except Exception as error:  # without a message, the parent would assume that the system killed this process
            print(json.dumps(_bug(error)), file=out)
            continue
        for answer in answers(work, unit):
            print(json.dumps(answer), file=out)


def _listen(lines: queue.SimpleQueue[str]) -> None:
    """Queue the lines of stdin. Exit the process when stdin is closed, even if the main thread is busy."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
