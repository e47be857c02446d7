"""Verified reads of blocks of a store in a bucket, through the memory of the process and a cache of blocks.

A call asks for all blocks of a batch. What neither the memory nor the cache has is fetched at the same time: blocks,
the pages with their checksums, and the second parts that verify the pages. Then the parts are compared in this order:
second parts, pages, blocks. A part of the cache that differs counts as missing. A part of the bucket that differs is
fetched once more, and an error names it if it differs again. No caller sees bytes that were not compared.

Parts that another thread fetches now are not fetched again. A thread waits for parts of a kind only after it has
published its own parts of this kind, and the kinds have an order, so two threads never wait for each other.

`forerun.data.blocks` defines the format. Three kinds of parts are read: the second part of `NAME.sums`, pages of
checksums, and blocks of data. The positions of all of them follow from the size of the file, so a reader asks for them
at the same time. Each kind is compared with the kind before it, and the second part with the root.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from xxhash import xxh3_64_digest, xxh3_128_digest

from forerun.data.blocks import BLOCK_BYTES, PAGE_BLOCKS, PAGE_BYTES, SUFFIX, SUM_BYTES, root_of
from forerun.data.reads.patient_reads import ByteLimit, PatientReads, ReadCounts, grouped, merged, rebuild_fix
from forerun.errors import UserError
from forerun.storage.folder import FileRange, Folder

V = TypeVar("V")

IN_FLIGHT_BYTES = 1 << 26  # of all requests that wait for an answer
SUMS_BYTES = 1 << 23  # of checksums: they are for 4 GiB of data
BLOCKS_BYTES = 1 << 25  # of offsets, and of extents if there is no cache
ARRAYS_BYTES = 1 << 25  # of complete arrays of offsets


# ---- Memory of the process: its limits hold for all stores, so a mixture of many needs no more than one ----


class Recent(Generic[V]):
    """Values by key, up to a limit of their total size. The values that were not used for the longest time go first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._used_bytes = limit_bytes, 0
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """Return the value of a key, or None."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: V, size_bytes: int) -> None:
        """Add a value, and remove old values until the limit holds. A value above the limit is not kept."""
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._used_bytes -= before
            if size_bytes > self._limit_bytes:
                return
            self._values[key] = value, size_bytes
            self._used_bytes += size_bytes
            while self._used_bytes > self._limit_bytes:
                self._used_bytes -= self._values.popitem(last=False)[1][1]

    @property
    def used_bytes(self) -> int:
        return self._used_bytes


@dataclass(frozen=True)
class ReadMemory:
    """The shared memory of readers. All values in it are verified."""

    sums: Recent[bytes] = field(default_factory=lambda: Recent(SUMS_BYTES))
    blocks: Recent[bytes] = field(default_factory=lambda: Recent(BLOCKS_BYTES))
    arrays: Recent[object] = field(default_factory=lambda: Recent(ARRAYS_BYTES))
    in_flight: ByteLimit = field(default_factory=lambda: ByteLimit(IN_FLIGHT_BYTES))


PROCESS = ReadMemory()


SECOND, PAGE, BLOCK = range(3)  # kinds of parts, in the order in which they are compared


# ---- Parts of a file with checksums ----


class SummedFile:
    """A file of a store: its name, its size and the root of its checksums. Nothing is read."""

    def __init__(self, name: str, size_bytes: int, root: str) -> None:
        self.name, self.size_bytes, self.root = name, size_bytes, root
        self.blocks = -(-size_bytes // BLOCK_BYTES)
        self.first_bytes = self.blocks * SUM_BYTES
        self.pages = -(-self.first_bytes // PAGE_BYTES)
        self.sums_bytes = self.first_bytes + self.pages * SUM_BYTES

    @cached_property
    def keys(self) -> tuple[bytes, bytes, bytes]:
        """The keys of the second part, the pages and the data in a cache of blocks."""
        return (
            xxh3_128_digest(f"{self.name}{SUFFIX} second {self.root}".encode()),
            xxh3_128_digest(f"{self.name}{SUFFIX} {self.root}".encode()),
            xxh3_128_digest(f"{self.name} {self.root}".encode()),
        )

    @cached_property
    def _hash(self) -> int:
        return hash(self.keys)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SummedFile) and self.keys == other.keys)


class SummedPart(NamedTuple):
    """A part of a file: its kind and its number. The second part is one part, with the number 0."""

    file: SummedFile
    kind: int
    number: int

    @property
    def range(self) -> FileRange:
        """Where the part lies."""
        file, number = self.file, self.number
        if self.kind == BLOCK:
            start = number * BLOCK_BYTES
            return FileRange(file.name, start, min(start + BLOCK_BYTES, file.size_bytes))
        if self.kind == PAGE:
            start = number * PAGE_BYTES
            return FileRange(file.name + SUFFIX, start, min(start + PAGE_BYTES, file.first_bytes))
        return FileRange(file.name + SUFFIX, file.first_bytes, file.sums_bytes)

    @property
    def parent(self) -> SummedPart | None:
        """The part with the checksum of this one; None for the second part, whose checksum is the root."""
        if self.kind == BLOCK:
            return SummedPart(self.file, PAGE, self.number // PAGE_BLOCKS)
        return SummedPart(self.file, SECOND, 0) if self.kind == PAGE else None

    def is_intact(self, data: bytes, parent: bytes) -> bool:
        """Return whether `data` is this part. `parent` is the content of the part with its checksum."""
        if self.kind == SECOND:
            return root_of(data, self.file.size_bytes) == self.file.root
        at = self.number % PAGE_BLOCKS * SUM_BYTES if self.kind == BLOCK else self.number * SUM_BYTES
        return xxh3_64_digest(data) == parent[at : at + SUM_BYTES]


class BlockRange(NamedTuple):
    """The blocks `first` .. `stop - 1` of a file.

    If one of them is missing, the blocks `around_first` .. `around_stop - 1` are fetched, which include them. If
    `is_kept`, blocks that were fetched stay in memory for a while.
    """

    file: SummedFile
    first: int
    stop: int
    around_first: int
    around_stop: int
    is_kept: bool = False


WHOLE_SUMS_BYTES = 1 << 16  # checksums of at most this size are fetched completely


# ---- Reader ----


class Cache(Protocol):
    """A cache of blocks on a disk of this machine. Its blocks are not verified, and no exception leaves it."""

    def get(self, key: bytes, block: int, count: int) -> list[bytes | None]: ...

    def put(self, key: bytes, block: int, data: bytes) -> None: ...


@dataclass(eq=False)
class _Flight:
    """The parts that one call fetches. Other calls wait for the event of a kind, and then find their parts here."""

    wanted: set[SummedPart] = field(default_factory=set)  # parts that other calls wait for
    done: dict[SummedPart, bytes] = field(default_factory=dict)
    ended: tuple[threading.Event, ...] = field(default_factory=lambda: tuple(threading.Event() for _ in range(3)))


class BlockReader:
    """Reads blocks of the files of a store. One reader serves all threads of a process.

    Args:
      folder: the folder of the store.
      cache: the cache of blocks, or None.
      counts: counts what is read.
      memory: recently used parts, and the limit of bytes in flight.
    """

    def __init__(
        self,
        folder: Folder,
        cache: Cache | None = None,
        counts: ReadCounts | None = None,
        memory: ReadMemory = PROCESS,
    ) -> None:
        self.folder, self.cache, self.counts, self.memory = folder, cache, counts or ReadCounts(), memory
        self._reads = PatientReads(folder, self.counts, memory.in_flight)
        self._flying: dict[SummedPart, _Flight] = {}
        self._lock = threading.Lock()
        self._repeated_before = folder.repeated_requests

    @property
    def repeated_requests(self) -> int:
        """Requests that the driver of the bucket has repeated by itself since this reader exists."""
        return self.folder.repeated_requests - self._repeated_before

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without open files and threads. The copy has no cache and its own counts."""
        return BlockReader, (self.folder,)

    def read(self, ranges: Sequence[BlockRange]) -> list[bytes]:
        """Return the verified bytes of all ranges, fetched at the same time.

        Raises:
          UserError: a block differs from its checksum twice, or an object is missing or cut short.
          StorageError: the bucket does not answer correctly for too long.
        """
        found: dict[SummedPart, bytes] = {}
        for part in (part for one in ranges if one.is_kept for part in _parts(one)):
            if part not in found and (data := self.memory.blocks.get(part)) is not None:
                found[part] = data
        missing = list(ranges)
        while missing := [one for one in missing if any(part not in found for part in _parts(one))]:
            _Call(self, missing, found).run()
        return [b"".join([found[part] for part in _parts(one)]) for one in ranges]


class _Call:
    """One pass of a call: claims parts that no other call fetches, fetches and compares them, and waits for others."""

    def __init__(self, reader: BlockReader, ranges: Sequence[BlockRange], found: dict[SummedPart, bytes]) -> None:
        self._reader, self._found, self._flight = reader, found, _Flight()
        self._ranges = ranges
        self._claimed: tuple[set[SummedPart], ...] = (set(), set(), set())
        self._joined: dict[SummedPart, _Flight] = {}
        self._raw: dict[SummedPart, bytes] = {}  # not compared yet
        self._cached: set[SummedPart] = set()  # parts of `_raw` that are from the cache
        self._kept: set[SummedPart] = set()
        self._sums: dict[SummedPart, bytes] = {}  # verified second parts and pages

    def run(self) -> None:
        """Add the verified blocks of all ranges to `found`, except for those that another thread failed to fetch."""
        try:
            self._claim([part for one in self._ranges for part in _parts(one) if part not in self._found])
            self._ask_cache()
            self._widen()
            self._ask_cache((SECOND, PAGE))
            missing = [part for part in self._claimed[BLOCK] if part not in self._raw]
            sums = [part for kind in (SECOND, PAGE) for part in self._claimed[kind] if part not in self._raw]
            groups = grouped(merged([part.range for part in missing]))
            spans = [*merged([part.range for part in sums]), *next(groups, [])]
            arrived = self._arrived(spans, [*sums, *missing])
            self._raw.update(arrived)
            for kind in (SECOND, PAGE):
                self._settle(kind, self._claimed[kind])
                self._end(kind)
                self._join(kind)
            self._settle(BLOCK, [part for part in self._claimed[BLOCK] if part in self._raw])
            for spans in groups:
                self._raw.update(self._arrived(spans, missing))
                self._settle(BLOCK, [part for part in missing if part in self._raw])
        finally:
            for kind in (SECOND, PAGE, BLOCK):
                self._end(kind)
        self._join(BLOCK)

    # What is fetched

    def _claim(self, blocks: Iterable[SummedPart]) -> None:
        """Claim the blocks, their pages and second parts, as far as they are missing and nobody fetches them now."""
        wanted: list[SummedPart] = []
        for block in blocks:
            wanted.append(block)
            page = block.parent
            assert page is not None
            if page not in self._sums:
                file = page.file
                whole = file.sums_bytes <= WHOLE_SUMS_BYTES
                numbers = range(file.pages) if whole else (page.number,)
                wanted += self._not_in_memory([SummedPart(file, PAGE, number) for number in numbers])
        seconds = {SummedPart(part.file, SECOND, 0) for part in wanted if part.kind == PAGE}
        wanted += self._not_in_memory(seconds)
        with self._reader._lock:
            for part in wanted:
                flight = self._reader._flying.setdefault(part, self._flight)
                if flight is self._flight:
                    self._claimed[part.kind].add(part)
                else:
                    flight.wanted.add(part)
                    self._joined[part] = flight

    def _not_in_memory(self, sums: Iterable[SummedPart]) -> Iterator[SummedPart]:
        for part in sums:
            if part not in self._sums:
                data = self._reader.memory.sums.get(part)
                if data is None:
                    yield part
                else:
                    self._sums[part] = data

    def _widen(self) -> None:
        """Claim the complete surroundings of each range of which the cache does not have all blocks."""
        wide: dict[SummedPart, None] = {}
        for one in self._ranges:
            parts = list(_parts(one))
            if one.is_kept:
                self._kept.update(parts)
            if all(part in self._raw or part not in self._claimed[BLOCK] for part in parts):
                continue
            around = [SummedPart(one.file, BLOCK, n) for n in range(one.around_first, one.around_stop)]
            wide.update(dict.fromkeys(around))
            if one.is_kept:
                self._kept.update(around)
        self._claim(part for part in wide if part not in self._claimed[BLOCK] and part not in self._joined)

    def _ask_cache(self, kinds: Sequence[int] = (SECOND, PAGE, BLOCK)) -> None:
        """Take claimed parts from the cache. They are compared later, as all others."""
        cache = self._reader.cache
        if cache is None:
            return
        for kind in kinds:
            numbers: dict[SummedFile, list[int]] = defaultdict(list)
            for part in self._claimed[kind]:
                if part not in self._raw:
                    numbers[part.file].append(part.number)
            for file, asked in numbers.items():
                if kind == SECOND:
                    size_bytes = file.sums_bytes - file.first_bytes
                    pieces = cache.get(file.keys[SECOND], 0, -(-size_bytes // BLOCK_BYTES))
                    whole = [piece for piece in pieces if piece is not None]
                    if len(whole) == len(pieces):
                        self._take(SummedPart(file, SECOND, 0), b"".join(whole))
                    continue
                for first, count in _runs(sorted(asked)):
                    for number, data in enumerate(cache.get(file.keys[kind], first, count), first):
                        if data is not None:
                            self._take(SummedPart(file, kind, number), data)

    def _take(self, part: SummedPart, cached: bytes) -> None:
        _, start, stop = part.range
        self._raw[part] = cached[: stop - start]  # the last block of a file is shorter
        self._cached.add(part)

    def _arrived(self, spans: Sequence[FileRange], parts: Iterable[SummedPart]) -> dict[SummedPart, bytes]:
        """Fetch spans, and return the content of the parts that lie in them."""
        answers = self._reader._reads.read(spans)
        found = {}
        order = sorted(range(len(spans)), key=spans.__getitem__)
        ascending = [spans[place] for place in order]
        for part in parts:
            name, start, stop = part.range
            at = bisect_right(ascending, (name, start, stop), key=lambda span: (span.name, span.start, stop)) - 1
            if at >= 0 and ascending[at].name == name and stop <= ascending[at].stop:
                begin = start - ascending[at].start
                found[part] = answers[order[at]][begin : begin + stop - start]
        return found

    # What is compared and published

    def _settle(self, kind: int, parts: Iterable[SummedPart]) -> None:
        """Compare parts, fetch those that differ once more, and publish them."""
        good: list[SummedPart] = []
        bad: list[SummedPart] = []
        for part in parts:
            (good if self._is_intact(part) else bad).append(part)
        self._publish(kind, good)
        from_cache = [part for part in bad if part in self._cached]
        counts = self._reader.counts
        if kind == BLOCK and self._reader.cache is not None:
            hits = sum(part in self._cached for part in good)
            counts.add(cache_hits=hits, cache_misses=len(good) + len(bad) - hits)
        if from_cache:
            counts.add(cache_damaged=len(from_cache))
        self._cached.difference_update(bad)
        self._raw.update(self._again(from_cache))
        bad = [part for part in bad if part not in from_cache or not self._is_intact(part)]
        if bad:
            counts.add(damaged_blocks=len(bad))
            self._raw.update(self._again(bad))
            for part in sorted(bad, key=lambda part: part.range):
                if not self._is_intact(part):
                    raise damaged_part(self._reader.folder, part)
        self._publish(kind, list(dict.fromkeys([*bad, *from_cache])))

    def _again(self, parts: Sequence[SummedPart]) -> dict[SummedPart, bytes]:
        return self._arrived(merged([part.range for part in parts]), parts)

    def _is_intact(self, part: SummedPart) -> bool:
        parent = part.parent
        return part.is_intact(self._raw[part], b"" if parent is None else self._verified_sums(parent))

    def _verified_sums(self, part: SummedPart) -> bytes:
        """Return a page or a second part, verified."""
        found = self._sums.get(part) or self._reader.memory.sums.get(part)
        if found is None:  # the thread that fetched it failed, or the memory is full
            self._raw.update(self._again([part]))
            self._settle(part.kind, [part])
            found = self._sums[part]
        return found

    def _publish(self, kind: int, parts: Sequence[SummedPart]) -> None:
        """Hand over verified parts: to this call, to calls that wait, to the memory and to the cache."""
        reader, flight = self._reader, self._flight
        if kind != BLOCK:
            for part in parts:
                self._sums[part] = self._raw[part]
                reader.memory.sums.put(part, self._raw[part], len(self._raw[part]))
        needed = {part for one in self._ranges for part in _parts(one)} if kind == BLOCK else set()
        for part in parts:
            if part in needed:
                self._found[part] = self._raw[part]
            if part in self._kept:
                reader.memory.blocks.put(part, self._raw[part], len(self._raw[part]))
        if reader.cache is not None:
            self._fill(reader.cache, kind, [part for part in parts if part not in self._cached])
        with reader._lock:
            for part in parts:
                if part in flight.wanted:
                    flight.done[part] = self._raw[part]
                if reader._flying.get(part) is flight:
                    del reader._flying[part]
        for part in parts:
            del self._raw[part]

    def _fill(self, cache: Cache, kind: int, parts: Sequence[SummedPart]) -> None:
        numbers: dict[SummedFile, list[int]] = defaultdict(list)
        for part in parts:
            numbers[part.file].append(part.number)
        for file, filled in numbers.items():
            for first, count in _runs(sorted(filled)):
                data = b"".join([self._raw[SummedPart(file, kind, number)] for number in range(first, first + count)])
                cache.put(file.keys[kind], first, data)

    def _end(self, kind: int) -> None:
        """Tell calls that wait for parts of a kind that no more of them will come."""
        flight, flying = self._flight, self._reader._flying
        if flight.ended[kind].is_set():
            return
        with self._reader._lock:
            for part in self._claimed[kind]:
                if flying.get(part) is flight:
                    del flying[part]
        flight.ended[kind].set()

    def _join(self, kind: int) -> None:
        """Wait for the parts of a kind that other calls fetch. A part that they failed to fetch stays missing."""
        for part, flight in self._joined.items():
            if part.kind != kind:
                continue
            flight.ended[kind].wait()
            data = flight.done.get(part)
            if data is not None:
                (self._found if kind == BLOCK else self._sums)[part] = data


def damaged_part(folder: Folder, part: SummedPart) -> UserError:
    """Return the error for a part that differs from its checksum, although it was fetched twice."""
    name, start, stop = part.range
    what = (
        f"bytes {start} to {stop - 1}"
        if name.endswith(SUFFIX)
        else f"block {part.number} (bytes {start} to {stop - 1})"
    )
    return UserError(
        "E-DATA-180",
        f"{folder.address}/{name} is damaged",
        why=f"{what} differs from its checksum, and it was fetched twice",
        fix=rebuild_fix(folder, name),
    )


def _parts(one: BlockRange) -> Iterator[SummedPart]:
    return (SummedPart(one.file, BLOCK, number) for number in range(one.first, one.stop))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the length of each run of consecutive numbers, at most a page of blocks long."""
    first = count = 0
    for number in numbers:
        if count and number == first + count and count < PAGE_BLOCKS:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count
