"""The plan of packing whole documents: which documents share which row, found once and kept on disk.

The documents are put into an order by a keyed permutation of their own (the same for every job), so that neighbours
in a file do not share rows, and that order is cut into windows. Inside a window first-fit-decreasing puts the items
into rows. An item is a document, or a piece of one that is longer than a row. Pieces that fill a row are rows of
their own, and come first in their window, ordered by document and piece; so a plan needs two bytes per item (the
document's place in its window), four per row and 24 per window, and a row is found without reading anything else.

On disk a plan is a folder of three arrays and `plan.json`, built under another name and renamed when it is complete.
Opening one compares its key, the sizes of the arrays, and the checksums of `plan.json` and of the window table. Blocks
of the other two arrays are compared with their checksums when they are read.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forerun.data import checked_json
from forerun.data.blocks import SUFFIX, BlockSums, damage
from forerun.data.documents import Documents
from forerun.data.ondisk import OnDisk
from forerun.data.order.fit import fitted
from forerun.data.order.permutation import ORDER, permuted
from forerun.data.order.rows import Counts
from forerun.errors import UserError

VERSION = 1
KEY = 0x5EED0F_D0C5  # of the documents' order: fixed, so that every job on the same documents shares the plan
ROWS_PER_WINDOW = 128  # the last, half-empty row of a window costs 0.4 %
FEWEST, MOST = 1024, 1 << 16  # documents in a window
TOGETHER = 1 << 21  # documents planned at a time
RESIDENT_BYTES = 1 << 20  # an array of at most this size stays in memory

TooLong: TypeAlias = Literal["split", "keep_start", "keep_end", "drop", "stop"]
Numbers: TypeAlias = "NDArray[Any] | OnDisk"
ARRAYS: dict[str, np.dtype[Any]] = {"items": np.dtype("<u2"), "starts": np.dtype("<u4"), "windows": np.dtype("<i8")}


@dataclass(frozen=True)
class Plan:
    """Row r of window w holds the items `starts[r]` .. `starts[r + 1]`, counted from the window's first item."""

    window: int  # documents in a window
    items: Numbers  # uint16: the document's place in its window
    starts: Numbers  # uint32, per row
    windows: NDArray[np.int64]  # [3, windows + 1]: first row, first item, rows that are filled by one piece
    counts: Counts
    source: tuple[Path, dict[str, Any]] | None = None  # where it lies, and its key
    checked: bool = True  # False: an earlier version of forerun wrote it without checksums of blocks

    def __reduce__(self) -> tuple[Any, ...]:
        """A plan on disk travels to another process as its name."""
        if self.source is not None:
            return _opened, self.source
        return Plan, (self.window, self.items, self.starts, self.windows, self.counts)

    def items_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return _at(self.items, places)

    def starts_at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return _at(self.starts, rows)


def _at(numbers: Numbers, places: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[Any] = numbers.at(places) if isinstance(numbers, OnDisk) else numbers[places]
    return found.astype(np.int64)


def window_size(documents: Documents, sequence: int) -> int:
    """Documents in a window: enough for 128 rows of average documents, and windows of even size."""
    count = len(documents)
    positions = max(1.0, documents.tokens / max(1, count) - 1)
    wanted = min(MOST, max(FEWEST, round(ROWS_PER_WINDOW * sequence / positions)))
    windows = max(round(count / wanted), -(-count // MOST), 1)
    return max(1, -(-count // windows))


def planned(documents: Documents, sequence: int, too_long: TooLong, folder: Path | None) -> Plan:
    """The plan: read from `folder` if it is there, else built and, with a folder, written."""
    window = window_size(documents, sequence)
    key = {
        "version": VERSION,
        "order": f"{ORDER} {KEY:x}",
        "documents": documents.digest,
        "sequence": sequence,
        "too_long": too_long,
        "window": window,
    }
    if folder is None:
        _refuse_too_long(documents, sequence, too_long)
        made = [np.concatenate(parts) for parts in zip(*_chunks(documents, sequence, too_long, window), strict=True)]
        items, starts, rows, firsts, full = made
        windows = np.stack([_sums(rows), _sums(firsts), np.append(full, 0)])
        return Plan(window, items, starts, windows, _counts(documents, sequence, too_long, window, len(starts)))
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    home = folder / name
    if not home.exists():
        _refuse_too_long(documents, sequence, too_long)
        _write(home, key, documents, sequence, too_long, window)
    return _opened(home, key)


def check_plan(plan: Plan, documents: Documents, sequence: int, too_long: TooLong) -> bool:
    """Compare a plan on disk with its checksums; a plan without is compared with a new one, whose checksums it gets.

    Returns whether checksums were added.
    """
    assert plan.source is not None
    home, key = plan.source
    if plan.checked:
        for array in (plan.items, plan.starts):
            assert isinstance(array, OnDisk)
            for start in range(0, len(array), TOGETHER):
                array.read(start, min(start + TOGETHER, len(array)))
        return False
    with _built(home, key, documents, sequence, too_long, plan.window) as part:
        for name in ARRAYS:
            if not filecmp.cmp(part / f"{name}.bin", home / f"{name}.bin", shallow=False):
                raise damage(home / f"{name}.bin", "it is not the plan of these documents")
        for name in (f"items.bin{SUFFIX}", f"starts.bin{SUFFIX}", "plan.json"):
            (part / name).replace(home / name)
    return True


def _write(
    home: Path, key: dict[str, Any], documents: Documents, sequence: int, too_long: TooLong, window: int
) -> None:
    """Whole or not at all: several hosts may plan at the same time, and the first to finish is kept."""
    with _built(home, key, documents, sequence, too_long, window) as part:
        try:
            part.rename(home)
        except OSError:
            if not (home / "plan.json").exists():
                raise


@contextmanager
def _built(
    home: Path, key: dict[str, Any], documents: Documents, sequence: int, too_long: TooLong, window: int
) -> Iterator[Path]:
    """Write a new plan to a folder beside `home`, and remove that folder afterwards unless it was moved."""
    part = home.with_name(f"{home.name}.{secrets.token_hex(4)}.part")
    part.mkdir(parents=True)
    try:
        table: list[tuple[NDArray[np.int64], ...]] = []
        rows_in_all = 0
        sums = {"items.bin": BlockSums(), "starts.bin": BlockSums()}
        with ExitStack() as stack:
            files = {name: stack.enter_context((part / name).open("wb")) for name in sums}
            for items, starts, rows, firsts, full in _chunks(documents, sequence, too_long, window):
                for name, numbers in (("items", items), ("starts", starts)):
                    raw = numbers.astype(ARRAYS[name]).tobytes()
                    files[f"{name}.bin"].write(raw)
                    sums[f"{name}.bin"].update(raw)
                table.append((rows, firsts, full))
                rows_in_all += len(starts)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        rows, firsts, full = (np.concatenate(column) for column in zip(*table, strict=True))
        windows = np.stack([_sums(rows), _sums(firsts), np.append(full, 0)]).astype(ARRAYS["windows"])
        _put(part / "windows.bin", windows.tobytes())
        roots = {}
        for name, one in sums.items():
            content, roots[name] = one.finish()
            _put(part / (name + SUFFIX), content)
        said = {
            "key": key,
            "bytes": {name: (part / f"{name}.bin").stat().st_size for name in ARRAYS},
            "windows_blake2b": hashlib.blake2b(windows.tobytes()).hexdigest(),
            "counts": _counts(documents, sequence, too_long, window, rows_in_all).to_json(),
            "blocks": roots,
        }
        _put(part / "plan.json", checked_json.encode(said, indent=1))
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put(file: Path, content: bytes) -> None:
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _opened(home: Path, key: dict[str, Any]) -> Plan:
    try:
        said, checked = checked_json.decode((home / "plan.json").read_bytes())
        sizes = {name: (home / f"{name}.bin").stat().st_size for name in ARRAYS}
        if said["key"] != key or said["bytes"] != sizes:
            raise ValueError(f"files of {sizes} bytes, written were {said['bytes']}")
        roots = said.get("blocks", {})
        items, starts, table = (
            OnDisk(home / f"{name}.bin", dtype, roots.get(f"{name}.bin"), RESIDENT_BYTES)
            for name, dtype in ARRAYS.items()
        )
        windows = table.read(0, len(table))
        if hashlib.blake2b(windows.data).hexdigest() != said["windows_blake2b"]:
            raise ValueError("the checksum of windows.bin is another")
        counts = Counts(**said["counts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{home}: the packing plan is damaged", why=str(error), fix=f"rm -r {home}: it is made again"
        ) from error
    return Plan(key["window"], items, starts, windows.reshape(3, -1), counts, (home, key), checked)


def _sums(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(values)]).astype(np.int64)


def _chunks(
    documents: Documents, sequence: int, too_long: TooLong, window: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Some windows at a time: items, starts, and of each window its rows, items and filled rows."""
    count = len(documents)
    step = max(1, TOGETHER // window) * window
    for begin in range(0, count, step):
        stop = min(begin + step, count)
        order = permuted(np.arange(begin, stop), count, KEY)
        positions = np.maximum(documents.begins(order + 1) - documents.begins(order) - 1, 0)
        if too_long == "drop":
            positions[positions > sequence] = 0
        elif too_long != "split":
            np.minimum(positions, sequence, out=positions)
        padded = np.zeros(-(-(stop - begin) // window) * window, np.int64)
        padded[: stop - begin] = positions
        yield _packed(padded.reshape(-1, window), sequence)


def _packed(
    positions: NDArray[np.int64], sequence: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    pieces, rest = np.divmod(positions, sequence)
    places, bins = fitted(rest, sequence)
    packed = (rest > 0).sum(1)
    items, starts, rows, firsts, full = [], [], [], [], pieces.sum(1)
    for w, count in enumerate(packed):
        alone = np.repeat(np.arange(positions.shape[1]), pieces[w])
        sizes = np.bincount(bins[w, :count])
        begins = np.concatenate([np.arange(len(alone)), len(alone) + np.cumsum(sizes) - sizes])
        items += [alone.astype(np.uint16), places[w, :count].astype(np.uint16)]
        starts.append(begins.astype(np.uint32))
        rows.append(len(begins))
        firsts.append(len(alone) + count)
    return np.concatenate(items), np.concatenate(starts), np.array(rows), np.array(firsts), full


def _counts(documents: Documents, sequence: int, too_long: TooLong, window: int, rows: int) -> Counts:
    """One pass over the documents in the order they lie."""
    total: dict[str, int] = dict.fromkeys(
        ("positions", "learned", "too_long", "dropped", "truncated_tokens", "nothing_to_learn"), 0
    )
    longest = 0
    for begins in _borders(documents):
        positions = np.maximum(np.diff(begins) - 1, 0)
        over = positions > sequence
        longest = max(longest, int(positions.max(initial=0)))
        total["too_long"] += int(over.sum())
        total["nothing_to_learn"] += int((positions == 0).sum())
        start, kept = kept_part(begins[:-1], positions, sequence, too_long)
        if too_long == "drop":
            total["dropped"] += int(over.sum())
            total["truncated_tokens"] += int((positions[over] + 1).sum())
        else:
            total["truncated_tokens"] += int((positions - kept).sum())
        total["positions"] += int(kept.sum())
        total["learned"] += learned_targets(documents, start, kept)
    return Counts(
        documents=len(documents),
        tokens=documents.tokens,
        rows=rows,
        sequence=sequence,
        became=too_long,
        longest=longest,
        **total,
    )


def kept_part(
    begins: NDArray[np.int64], positions: NDArray[np.int64], sequence: int, too_long: TooLong
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the part of each document that is used begins, and its positions."""
    if too_long == "split":
        return begins, positions
    kept = np.minimum(positions, sequence)
    if too_long == "drop":
        kept = np.where(positions > sequence, 0, positions)
    return (begins + positions - kept if too_long == "keep_end" else begins), kept


def _borders(documents: Documents) -> Iterator[NDArray[np.int64]]:
    """The documents' begins, some at a time; the last of one array is the first of the next."""
    for begin in range(0, len(documents), TOGETHER):
        yield documents.begins(np.arange(begin, min(begin + TOGETHER, len(documents)) + 1))


def learned_targets(documents: Documents, starts: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
    """How many of the targets (the tokens after each start) are to be learned; documents in ascending order."""
    if not documents.masked:
        return int(positions.sum())
    found = 0
    some = max(1, (1 << 24) * len(documents) // documents.tokens)  # about 16M tokens at a time
    for i in range(0, len(starts), some):
        begin, size = starts[i : i + some], positions[i : i + some]
        mask = documents.read(int(begin[0]), int(begin[-1] + size[-1] + 1))[1]
        if mask is None:
            found += int(size.sum())
            continue
        sums = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        at = begin - begin[0] + 1
        end = len(sums) - 1  # an empty document at the very end would begin beyond it
        found += int((sums[np.minimum(at + size, end)] - sums[np.minimum(at, end)]).sum())
    return found


def _refuse_too_long(documents: Documents, sequence: int, too_long: TooLong) -> None:
    if too_long != "stop":
        return
    many, longest = 0, 0
    for begins in _borders(documents):
        positions = np.diff(begins) - 1
        many += int((positions > sequence).sum())
        longest = max(longest, int(positions.max(initial=0)))
    if many:
        raise UserError(
            f"{many} of {len(documents)} documents {'is' if many == 1 else 'are'} longer than the sequence",
            why=f"sequence is {sequence}, the longest document takes {longest}; data.too_long is stop",
            fix=f"data.too_long=split, keep_start, keep_end or drop; sequence={longest} would hold the longest",
        )
