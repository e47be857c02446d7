"""Rows of complete documents: each document is in one row, and a row holds several documents.

A document of n tokens takes n-1 positions: its last token is a target only. Documents of less than two tokens have no
target and are omitted. A document that is longer than a row follows the policy `too_long`. Under `split` it becomes
pieces of S positions, and the last piece is shorter. The target of a piece's last position is the document's next
token, so no target is lost. Positions start at 0 in each piece, because attention does not reach across rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data import checked_json
from forerun.data.blocks import SUFFIX, BlockSums
from forerun.data.disk_array import DiskArray
from forerun.data.documents import Documents
from forerun.data.order.packing import (
    KEY,
    VERSION,
    TooLong,
    apply_policy,
    pack,
    packing_order,
    refuse_too_long,
    window_size,
)
from forerun.data.order.permutation import ORDER
from forerun.data.order.rows import Arrays, Example, RowCounts, count_loss_targets, lay_out_rows
from forerun.errors import UserError

# ---- Packing plans: which complete documents share which row, computed once and stored on disk ----
#
# An item of a row is a document, or a piece of one that is longer than a row. A plan names documents by their place in
# their window (see `packing`), so it needs two bytes per item, four per row and 24 per window. A row is looked up
# without reading the rest of the plan.
#
# On disk a plan is a folder of three arrays and `plan.json`, built under another name and renamed when it is complete.
# Opening one compares its key, the sizes of the arrays, and the checksums of `plan.json` and of the window table.
# Blocks of the other two arrays are compared with their checksums when they are read.


TOGETHER = 1 << 21  # documents planned at a time
RESIDENT_BYTES = 1 << 20  # an array of at most this size stays in memory

Numbers: TypeAlias = "NDArray[Any] | DiskArray"
ARRAYS: dict[str, np.dtype[Any]] = {"items": np.dtype("<u2"), "starts": np.dtype("<u4"), "windows": np.dtype("<i8")}


@dataclass(frozen=True)
class Plan:
    """A packing plan. Row r holds the items `starts[r]` .. `starts[r + 1] - 1`, counted inside its window."""

    window: int  # documents in a window
    items: Numbers  # uint16: the document's place in its window
    starts: Numbers  # uint32, per row
    windows: NDArray[np.int64]  # [3, windows + 1]: first row, first item, rows that are filled by one piece
    counts: RowCounts
    source: tuple[Path, dict[str, Any]] | None = None  # where it is stored, and its key

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a plan on disk as its path and key, without its content."""
        if self.source is not None:
            return _open_plan, self.source
        return Plan, (self.window, self.items, self.starts, self.windows, self.counts)


def numbers_at(numbers: Numbers, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of an array of a plan at `places`."""
    found: NDArray[Any] = numbers.at(places) if isinstance(numbers, DiskArray) else numbers[places]
    return found.astype(np.int64)


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a plan depends on."""

    documents: Documents
    sequence: int
    too_long: TooLong

    @cached_property
    def window(self) -> int:
        return window_size(len(self.documents), self.documents.tokens, self.sequence)

    @property
    def key(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "order": f"{ORDER} {KEY:x}",
            "documents": self.documents.digest,
            "sequence": self.sequence,
            "too_long": self.too_long,
            "window": self.window,
        }

    def refuse_too_long(self) -> None:
        """Raise UserError if the policy is `stop` and a document is longer than a row."""
        if self.too_long == "stop":
            refuse_too_long((np.diff(begins) - 1 for begins in self.borders()), self.sequence, pairs=False)

    def borders(self) -> Iterator[NDArray[np.int64]]:
        """Yield the addresses at which documents begin, in chunks. The last one of a chunk is the first of the next."""
        count = len(self.documents)
        for begin in range(0, count, TOGETHER):
            yield self.documents.begins(np.arange(begin, min(begin + TOGETHER, count) + 1))


def open_or_build_plan(documents: Documents, sequence: int, too_long: TooLong, folder: Path | None) -> Plan:
    """Return the packing plan of `documents`, and build it if it does not exist yet.

    Args:
      documents: the documents to pack.
      sequence: positions of a row.
      too_long: what happens to documents that are longer than a row.
      folder: folder in which plans are stored, each under the hash of its key; None: the plan stays in memory.

    Raises:
      UserError: the stored plan is damaged, or the policy is `stop` and a document is too long.
    """
    request = PlanRequest(documents, sequence, too_long)
    if folder is None:
        request.refuse_too_long()
        chunks = list(_packed_chunks(request))
        items, starts = (np.concatenate(parts) for parts in zip(*((c.items, c.starts) for c in chunks), strict=True))
        return Plan(request.window, items, starts, _window_table(chunks), _counts(request, len(starts)))
    key = request.key
    home = folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    if not home.exists():
        request.refuse_too_long()
        _write(home, request)
    return _open_plan(home, key)


def _write(home: Path, request: PlanRequest) -> None:
    """Write a plan atomically. If several hosts write it at the same time, the first one to finish wins."""
    part = home.with_name(f"{home.name}.{secrets.token_hex(4)}.part")
    part.mkdir(parents=True)
    try:
        chunks: list[_PackedChunk] = []
        row_count = 0
        sums = {"items.bin": BlockSums(), "starts.bin": BlockSums()}
        with ExitStack() as stack:
            files = {name: stack.enter_context((part / name).open("wb")) for name in sums}
            for chunk in _packed_chunks(request):
                for name, numbers in (("items", chunk.items), ("starts", chunk.starts)):
                    raw = numbers.astype(ARRAYS[name]).tobytes()
                    files[f"{name}.bin"].write(raw)
                    sums[f"{name}.bin"].update(raw)
                row_count += len(chunk.starts)
                chunks.append(chunk.without_items())
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        windows = _window_table(chunks).astype(ARRAYS["windows"])
        _put(part / "windows.bin", windows.tobytes())
        roots = {}
        for name, one in sums.items():
            content, roots[name] = one.finish()
            _put(part / (name + SUFFIX), content)
        summary = {
            "key": request.key,
            "bytes": {name: (part / f"{name}.bin").stat().st_size for name in ARRAYS},
            "windows_blake2b": hashlib.blake2b(windows.tobytes()).hexdigest(),
            "counts": _counts(request, row_count).to_json(),
            "blocks": roots,
        }
        _put(part / "plan.json", checked_json.encode(summary, indent=1))
        try:
            part.rename(home)
        except OSError:
            if not (home / "plan.json").exists():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put(file: Path, content: bytes) -> None:
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _open_plan(home: Path, key: dict[str, Any]) -> Plan:
    try:
        content = checked_json.decode((home / "plan.json").read_bytes())
        sizes = {name: (home / f"{name}.bin").stat().st_size for name in ARRAYS}
        if content["key"] != key or content["bytes"] != sizes:
            raise ValueError(f"its files have {sizes} bytes, but {content['bytes']} were written")
        items, starts = (
            DiskArray(home / f"{name}.bin", ARRAYS[name], content["blocks"][f"{name}.bin"], RESIDENT_BYTES)
            for name in ("items", "starts")
        )
        windows = np.fromfile(home / "windows.bin", ARRAYS["windows"])
        if hashlib.blake2b(windows.data).hexdigest() != content["windows_blake2b"]:
            raise ValueError("the checksum of windows.bin differs")
        counts = RowCounts(**content["counts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "E-DATA-019",
            f"{home}: the packing plan is damaged",
            why=str(error),
            fix=f"remove it, and forerun builds it again: rm -r {home}",
        ) from error
    return Plan(key["window"], items, starts, windows.reshape(3, -1), counts, (home, key))


class _PackedChunk(NamedTuple):
    """The packed rows of some windows. The last three arrays have one number per window."""

    items: NDArray[np.uint16]
    starts: NDArray[np.uint32]
    rows: NDArray[np.int64]
    item_counts: NDArray[np.int64]
    full_rows: NDArray[np.int64]  # rows that are filled by one piece

    def without_items(self) -> _PackedChunk:
        """Return only the numbers per window, so that the large arrays can be freed."""
        return self._replace(items=np.zeros(0, np.uint16), starts=np.zeros(0, np.uint32))


def _window_table(chunks: list[_PackedChunk]) -> NDArray[np.int64]:
    rows, items, full = (np.concatenate(column) for column in zip(*(chunk[2:] for chunk in chunks), strict=True))
    return np.stack([_sums(rows), _sums(items), np.append(full, 0)])


def _sums(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return cumulative sums that start with 0: one more than there are values."""
    return np.concatenate([[0], np.cumsum(values)]).astype(np.int64)


def _packed_chunks(request: PlanRequest) -> Iterator[_PackedChunk]:
    """Yield the packed rows, some windows at a time, in the form in which a plan stores them."""
    count, window, documents = len(request.documents), request.window, request.documents
    step = max(1, TOGETHER // window) * window
    for begin in range(0, count, step):
        order = packing_order(np.arange(begin, min(begin + step, count)), count)
        positions = np.maximum(documents.begins(order + 1) - documents.begins(order) - 1, 0)
        _, kept = apply_policy(positions, request.sequence, request.too_long)
        items, row_starts = pack(kept, request.sequence, window)
        windows = -(-len(order) // window)
        row_window = items[row_starts] // window
        item_counts = np.bincount(items // window, minlength=windows)
        yield _PackedChunk(
            (items % window).astype(np.uint16),
            (row_starts - _sums(item_counts)[row_window]).astype(np.uint32),
            np.bincount(row_window, minlength=windows),
            item_counts,
            np.add.reduceat(kept // request.sequence, np.arange(0, len(order), window)),
        )


def _counts(request: PlanRequest, rows: int) -> RowCounts:
    """Return the counts of the documents, from one pass in the order in which they are stored."""
    total: dict[str, int] = dict.fromkeys(
        ("positions", "learned", "too_long", "dropped", "truncated_tokens", "nothing_to_learn"), 0
    )
    longest = 0
    for begins in request.borders():
        positions = np.maximum(np.diff(begins) - 1, 0)
        over = positions > request.sequence
        longest = max(longest, int(positions.max(initial=0)))
        total["too_long"] += int(over.sum())
        total["nothing_to_learn"] += int((positions == 0).sum())
        cut, kept = apply_policy(positions, request.sequence, request.too_long)
        if request.too_long == "drop":
            total["dropped"] += int(over.sum())
            total["truncated_tokens"] += int((positions[over] + 1).sum())
        else:
            total["truncated_tokens"] += int((positions - kept).sum())
        total["positions"] += int(kept.sum())
        total["learned"] += count_loss_targets(request.documents, begins[:-1] + cut, kept)
    return RowCounts(
        documents=len(request.documents),
        tokens=request.documents.tokens,
        rows=rows,
        sequence=request.sequence,
        became=request.too_long,
        longest=longest,
        **total,
    )


@dataclass(frozen=True)
class _Items:
    """The items of some rows, row after row."""

    each: NDArray[np.int64]  # items in each row
    documents: NDArray[np.int64]
    pieces: NDArray[np.int64]
    in_pieces: NDArray[np.bool_]  # whether the document has several pieces
    starts: NDArray[np.int64]  # address of the first token of each item
    positions: NDArray[np.int64]


class WholeDocuments:
    """Rows of complete documents, packed first-fit-decreasing.

    Args:
      documents: the documents to pack.
      sequence: positions of a row.
      too_long: what happens to documents that are longer than a row.
      plan_folder: folder in which the packing plan is stored and reused; None: the plan stays in memory.
    """

    def __init__(
        self,
        documents: Documents,
        sequence: int,
        *,
        too_long: TooLong = "split",
        plan_folder: Path | None = None,
    ) -> None:
        self._documents, self.sequence, self.too_long = documents, sequence, too_long
        if documents.tokens < 2:
            raise UserError(
                "E-DATA-021",
                "data.path: too little text",
                why=f"{documents.tokens} tokens in total",
                fix="give more text",
            )
        self._plan = open_or_build_plan(documents, sequence, too_long, plan_folder)
        if not len(self):
            counts = self._plan.counts
            dropped = f", {counts.dropped} of them longer than the sequence and dropped" if counts.dropped else ""
            raise UserError(
                "E-DATA-022",
                "data.path: nothing to train on",
                why=f"{counts.documents} documents of {counts.tokens} tokens in total{dropped}",
                fix="give more text" if too_long != "drop" else "set data.too_long=split, or a longer sequence",
            )

    def __len__(self) -> int:
        return len(self._plan.starts)

    @property
    def report(self) -> RowCounts:
        return self._plan.counts

    def check(self) -> None:
        """Compare the plan on disk with its checksums. Raise UserError if it is damaged."""
        for array in (self._plan.items, self._plan.starts):
            assert isinstance(array, DiskArray)
            for start in range(0, len(array), TOGETHER):
                array.read(start, min(start + TOGETHER, len(array)))

    @property
    def window(self) -> int:
        """Number of documents that are packed together."""
        return self._plan.window

    @cached_property
    def digest(self) -> str:
        identity = f"whole {VERSION} {self._documents.digest} {self.sequence} {self.too_long} {self._plan.window}"
        return hashlib.sha256(identity.encode()).hexdigest()[:12]

    def examples(self, row: int) -> list[Example]:
        found = self._items(np.array([row]))
        both = zip(found.documents.tolist(), found.pieces.tolist(), found.in_pieces.tolist(), strict=True)
        return [(document, piece) if several else (document,) for document, piece, several in both]

    def take(self, indices: ArrayLike) -> Arrays:
        found = self._items(np.asarray(indices, np.int64))
        return lay_out_rows(self._documents.read_many, found.each, found.starts, found.positions, self.sequence)

    def _items(self, index: NDArray[np.int64]) -> _Items:
        """Return the documents and pieces of the rows `index`."""
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        plan, S = self._plan, self.sequence
        first_row, first_item, full = plan.windows
        window = np.searchsorted(first_row, index, side="right") - 1
        # A row ends where the next one starts, and the last row of a window at the end of the window.
        last = index + 1 == first_row[window + 1]
        begin, after = np.split(numbers_at(plan.starts, np.concatenate([index, np.where(last, index, index + 1)])), 2)
        each = np.where(last, first_item[window + 1] - first_item[window], after) - begin
        begin += first_item[window]
        flat = np.repeat(begin - (np.cumsum(each) - each), each) + np.arange(int(each.sum()))
        document = packing_order(
            np.repeat(window, each) * plan.window + numbers_at(plan.items, flat), len(self._documents)
        )
        begins, ends = self._documents.begins(np.stack([document, document + 1]))
        total = ends - begins - 1
        cut, positions = apply_policy(total, S, self.too_long)
        starts = begins + cut
        pieces = np.zeros_like(document)
        if self.too_long == "split":
            # The first `full` rows of a window hold one full piece each. A piece in any other row is the rest of its
            # document, which follows the full pieces.
            alone = np.repeat(index - first_row[window] < full[window], each)
            pieces = positions // S
            if alone.any():
                pieces[alone] = self._piece_numbers(index, window)
            starts = starts + pieces * S
            positions = np.where(alone, S, positions - pieces * S)
        return _Items(each, document, pieces, (total > S) & (self.too_long == "split"), starts, positions)

    def _piece_numbers(self, index: NDArray[np.int64], window: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each piece that fills a row, in the order of `index`.

        The rows of a document's full pieces follow each other, so a piece's number is the distance from the first one.
        """
        first_row, first_item, full = self._plan.windows
        found = []
        for r, w in zip((index - first_row[window]).tolist(), window.tolist(), strict=True):
            if r < full[w]:
                own = numbers_at(self._plan.items, np.arange(first_item[w], first_item[w] + full[w]))
                found.append(r - int(np.searchsorted(own, own[r])))
        return np.array(found, np.int64)
