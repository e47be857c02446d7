"""The process that tokenizes: `python -m forerun.data.tokens.worker`, one JSON line in, one or more out.

The first line says what to do all day (source, recipe, store, whether a bad row stops); then each line is a unit. It
answers with `progress` while it works, then with `done`, `bad` (a row that stops), `error`, or `storage` (a disk that
fails). When its stdin is closed, whatever it is doing, it ends: the process that started it is gone.
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
from pathlib import Path
from typing import Any

from forerun.data.source.rows import Bad, Piece, Place, Row
from forerun.data.source.sources import Source
from forerun.data.tokens.document import Encoded, Encoder
from forerun.data.tokens.memory import no_memory
from forerun.data.tokens.recipe import Recipe, is_validation
from forerun.data.tokens.unit import Unit, UnitWriter, bad_json, no_room, summary_of
from forerun.errors import StorageError, UserError

BATCH_ROWS = 500
BATCH_CHARACTERS = 1 << 20
PROGRESS_SECONDS = 0.5


class StoppedError(Exception):
    """By a bad row, which has its absolute place."""

    def __init__(self, bad: Bad) -> None:
        super().__init__(bad.what)
        self.bad = bad


class RowFailedError(Exception):
    """Encoding raised an error that is no fault of the data, at a row whose absolute place is known."""

    def __init__(self, place: Place) -> None:
        super().__init__(str(place))
        self.place = place


class Work:
    """Units of one source, one after the other."""

    def __init__(self, source: Source, recipe: Recipe, store: Path, *, rows_stop: bool, files_stop: bool) -> None:
        self._source, self._recipe, self.store = source, recipe, store
        self._rows_stop, self._files_stop = rows_stop, files_stop
        self._encoder = Encoder(recipe, source.form)

    def build(self, unit: Unit) -> Iterator[dict[str, int]]:
        """Builds the unit, and says now and then how far it is. A unit that is there already is left as it is."""
        if summary_of(self.store, unit.name) is not None:
            return
        writer = UnitWriter(self.store, unit, self._recipe.vocab)
        told = time.monotonic()
        try:
            for piece in unit.pieces:
                places = _Places(self._source, piece)
                for batch in _batches(self._source.rows(piece)):
                    self._write(writer, batch, places)
                    if time.monotonic() - told > PROGRESS_SECONDS:
                        told = time.monotonic()
                        yield {"documents": writer.documents, "tokens": writer.tokens}
            writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def _write(self, writer: UnitWriter, batch: list[Row | Bad], places: _Places) -> None:
        rows = [row for row in batch if isinstance(row, Row)]
        try:
            encoded = iter(self._encoder.encode(rows))
        except (UserError, MemoryError, OSError):
            raise
        except Exception as error:
            raise RowFailedError(places.absolute_place(self._failing(rows).place)) from error
        sides: dict[str, list[Encoded]] = {"train": [], "validation": []}
        for row in batch:
            found = next(encoded) if isinstance(row, Row) else row
            if isinstance(found, Bad):
                bad = places.absolute(found)
                if self._files_stop if bad.whole_file else self._rows_stop:
                    raise StoppedError(bad)
                writer.skip(bad)
                continue
            assert isinstance(row, Row)
            apart = self._recipe.validation > 0 and is_validation(row.values, self._recipe.validation)
            sides["validation" if apart else "train"].append(found)
        for side, documents in sides.items():
            writer.add(side, documents)

    def _failing(self, rows: list[Row]) -> Row:
        """Return the first row that cannot be encoded alone, or the first one if each can."""
        for row in rows:
            try:
                self._encoder.encode([row])
            except Exception:
                return row
        return rows[0]


class _Places:
    """Absolute places of a piece; what stands before the piece is counted once."""

    def __init__(self, source: Source, piece: Piece) -> None:
        self._source, self._piece = source, piece
        self._before: int | None = None

    def absolute(self, bad: Bad) -> Bad:
        return replace(bad, place=self.absolute_place(bad.place))

    def absolute_place(self, place: Place) -> Place:
        if place.number is None:
            return place
        if self._before is None:
            first = self._source.resolve(self._piece, Place(place.file, 1, place.word)).number
            self._before = 0 if first is None else first - 1
        return place._replace(number=place.number + self._before)


def _batches(rows: Iterator[Row | Bad]) -> Iterator[list[Row | Bad]]:
    batch: list[Row | Bad] = []
    characters = 0
    for row in rows:
        batch.append(row)
        if isinstance(row, Row):
            characters += _length(row.values)
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _length(values: dict[str, Any]) -> int:
    """About the characters of a row."""
    held = list(values.values())
    spoken = [message for one in held if isinstance(one, list) for message in one if isinstance(message, dict)]
    held += [message.get("content") for message in spoken]
    return sum(len(value) for value in held if isinstance(value, str | list))


def answers(work: Work, unit: Unit) -> Iterator[dict[str, Any]]:
    """Yield the messages about one unit. The last one is done, bad, error, storage or bug."""
    try:
        for progress in work.build(unit):
            yield {"progress": progress}
        yield {"done": unit.number}
    except StoppedError as stopped:
        yield {"bad": bad_json(stopped.bad)}
    except UserError as error:
        yield _told(error)
    except MemoryError:
        yield _told(no_memory(f"unit {unit.name}"))
    except OSError as error:  # those of the data are bad rows long before
        yield _told(no_room(work.store, error))
    except Exception as error:
        yield _bug(error)


def _bug(error: Exception) -> dict[str, Any]:
    """Return the message about an error that nothing else expects: where it was, its type and text, its traceback."""
    where = str(error.place) if isinstance(error, RowFailedError) else None
    cause = (error.__cause__ or error) if where else error
    trace = "".join(traceback.format_exception(cause))[-4000:]
    return {"bug": {"where": where, "error": f"{type(cause).__name__}: {cause}", "trace": trace}}


def _told(error: UserError) -> dict[str, Any]:
    kind = "storage" if isinstance(error, StorageError) else "error"
    return {kind: {"what": error.what, "why": error.why, "fix": error.fix}}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started us decides
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints does not come between the answers
    told = json.loads(sys.stdin.readline())
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    work: Work | None = None
    while True:
        unit = Unit.from_json(json.loads(lines.get()))
        try:
            work = work or _work(told)
        except UserError as error:
            print(json.dumps(_told(error)), file=out)
            continue
        except MemoryError:
            print(json.dumps(_told(no_memory("its own tables"))), file=out)
            continue
        except Exception as error:  # without an answer, it would be taken for a process that the system killed
            print(json.dumps(_bug(error)), file=out)
            continue
        for answer in answers(work, unit):
            print(json.dumps(answer), file=out)


def _work(told: dict[str, Any]) -> Work:
    source, recipe = Source.from_json(told["source"]), Recipe.from_json(told["recipe"])
    return Work(source, recipe, Path(told["store"]), rows_stop=told["rows_stop"], files_stop=told["files_stop"])


def _listen(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
