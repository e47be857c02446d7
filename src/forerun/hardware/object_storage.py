"""Requests of a run to object storage, their prices, and which of the orders `rows` and `blocks` suits the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from forerun.hardware.rows import shipped
from forerun.units import Bytes

Shuffle = Literal["rows", "blocks"]

BLOCK_BYTES = 512 * 1024  # of tokens; a request of this size takes little longer than one of 4 KiB
LANES = (1024, 4096)
BLOCKS_PER_LANE = 64  # at least: the blocks in use are at most a 64th of the data

# How the reader of stores in buckets works (forerun.data.reads); a test compares them.
CHECKED_BYTES = 4096  # the part of a file that has one checksum, and is read completely
SUMS_SHARE = 512  # bytes of data per byte of checksums
SUMS_MEMORY_BYTES = 1 << 23
BORDERS_MEMORY_BYTES = 1 << 24  # borders of documents that stay in memory completely
BORDER_BYTES = 8
BORDERS_READ_BYTES = 1 << 15
EXTENTS_MEMORY_BYTES = 1 << 25  # for extents, if there is no cache
MERGED_GAP_BYTES = 1 << 16  # ranges of one file with at most this gap are one request


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of the order `blocks`. They depend on the data only."""

    block_rows: int  # consecutive rows that are read with one request
    lanes: int  # blocks in use at the same time

    @classmethod
    def of(cls, rows: int, row_bytes: int) -> BlockSizes:
        """Return the sizes for data of that many rows. Small data gets blocks of one row: a complete permutation."""
        least, most = LANES
        block_rows = max(1, min(BLOCK_BYTES // row_bytes, rows // (least * BLOCKS_PER_LANE)))
        lanes = 1 << max(0, (rows // block_rows // BLOCKS_PER_LANE).bit_length() - 1)  # a power of two
        return cls(block_rows, max(least, min(most, lanes)))


@dataclass(frozen=True)
class RequestPrice:
    """USD per 1,000 reading requests to object storage."""

    name: str
    usd_per_1000_reads: float
    date: str
    source: str


@cache
def request_price(protocol: str) -> RequestPrice | None:
    """Return the price for addresses of a protocol, such as `gs`; None if it is not known."""
    for row in shipped("requests.csv").rows:
        if row.text("protocol") == protocol:
            usd_reads = float(row.text("usd_per_1000_reads"))
            return RequestPrice(row.text("name"), usd_reads, row.text("date"), row.text("source"))
    return None


@dataclass(frozen=True)
class ReadLoad:
    """What a run reads from a store in a bucket."""

    protocol: str  # of the store's address
    batch: int
    sequence: int
    token_bytes: int
    rows: int
    documents: int
    hosts: int = 1
    steps: int | None = None
    ranges_per_row: float = 1.0  # documents of a row that lie at different places; 1 for concatenated documents
    has_mask: bool = False  # some tokens have no loss
    weighted_parts: int = 0  # parts of a mixture with weights, which have orders of their own
    can_use_blocks: bool = True  # whether neighbouring rows are neighbours in the files
    cache_bytes: int = 0  # of each host
    is_assumed: bool = False  # the data is not open: rows and documents are assumed

    @property
    def row_bytes(self) -> int:
        return self.sequence * self.token_bytes

    @property
    def data_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def sizes(self) -> BlockSizes:
        """The sizes of the order `blocks`. Parts with weights are taken as equally large."""
        return BlockSizes.of(self.rows // (self.weighted_parts or 1), self.row_bytes)

    @property
    def hosts_per_block(self) -> int:
        """How many hosts read a block in the order `blocks`.

        A lane takes part in every batch at batch / gcd(batch, lanes) different slots, one after the other. With
        weights, the slots of a lane are random.
        """
        sizes = self.sizes
        slots = self.batch if self.weighted_parts else self.batch // math.gcd(self.batch, sizes.lanes)
        return min(slots, sizes.block_rows, self.hosts)

    @property
    def used_bytes(self) -> float:
        """Bytes of the blocks that a host uses at the same time in the order `blocks`."""
        sizes = self.sizes
        lanes = sizes.lanes * (self.weighted_parts or 1)
        return lanes * sizes.block_rows * self.row_bytes * self.hosts_per_block / self.hosts

    @property
    def fits(self) -> bool:
        """Whether a host can keep the blocks that it uses. Otherwise each row would fetch its block again."""
        return self.used_bytes * 1.1 <= (self.cache_bytes or EXTENTS_MEMORY_BYTES)


@dataclass(frozen=True)
class StepReads:
    """The requests of an average step in the first epoch, of all hosts together."""

    shuffle: Shuffle
    requests: float
    read_bytes: float
    hosts: int
    usd_per_1000_steps: float | None  # None: no price is known
    usd_of_run: float | None  # None: the number of steps is not known

    def to_json(self) -> dict[str, float | str | None]:
        """Return the numbers by name."""
        return {
            "shuffle": self.shuffle,
            "requests_per_step": self.requests,
            "requests_per_step_and_host": self.requests / self.hosts,
            "bytes_per_step": self.read_bytes,
            "bytes_per_step_and_host": self.read_bytes / self.hosts,
            "request_usd_per_1000_steps": self.usd_per_1000_steps,
            "request_usd_of_run": self.usd_of_run,
        }


def step_reads(load: ReadLoad, shuffle: Shuffle) -> StepReads:
    """Return the requests of a step.

    A read is a row, or a block of rows in the order `blocks`. It needs one request for its tokens, one for its mask if
    there is one, and one each for checksums and for borders of documents that are not in memory. Borders and checksums
    that the cache holds are counted as requests, so large data may need fewer.
    """
    rows = load.batch
    reads, read_bytes = load.ranges_per_row * rows, load.row_bytes / load.ranges_per_row
    if shuffle == "blocks" and load.can_use_blocks and load.sizes.block_rows > 1:
        read_bytes = float(load.sizes.block_rows * load.row_bytes)
        reads = rows * (load.hosts_per_block / load.sizes.block_rows if load.fits else 1.0)
    # Ranges of one host in one step that are near to each other are one request.
    others = max(0.0, reads / load.hosts - 1)
    reads *= math.exp(-others * (MERGED_GAP_BYTES + read_bytes) / load.data_bytes)
    border_bytes = BORDER_BYTES * load.documents
    sums_bytes = (load.data_bytes + border_bytes) / SUMS_SHARE
    sums = _missed(sums_bytes, SUMS_MEMORY_BYTES)
    borders = _missed(border_bytes, BORDERS_MEMORY_BYTES)
    # The checksums of a large file have checksums too.
    requests = reads * (1 + sums + _missed(sums_bytes / SUMS_SHARE, SUMS_MEMORY_BYTES) + borders * (1 + sums))
    moved = reads * (read_bytes + CHECKED_BYTES * (1 + sums) + borders * (BORDERS_READ_BYTES + CHECKED_BYTES * sums))
    if load.has_mask:
        requests += reads * (1 + sums)
        moved += reads * (read_bytes / load.token_bytes / 8 + CHECKED_BYTES * (1 + sums))
    price = request_price(load.protocol)
    usd = None if price is None else price.usd_per_1000_reads * requests
    run = None if usd is None or load.steps is None else usd * load.steps / 1000
    return StepReads(shuffle, requests, moved, load.hosts, usd, run)


def _missed(size_bytes: float, memory_bytes: int) -> float:
    """Return the share of random reads that the memory does not have."""
    return 0.0 if size_bytes <= memory_bytes else 1 - memory_bytes / size_bytes


@dataclass(frozen=True)
class Advice:
    """The recommended order, and why."""

    shuffle: Shuffle
    reason: str


def advice(load: ReadLoad) -> Advice:
    """Return which order suits the run."""
    rows, blocks = step_reads(load, "rows"), step_reads(load, "blocks")
    if not load.can_use_blocks:
        return Advice("rows", "blocks saves nothing: rows that follow each other are not neighbours in the files")
    if load.sizes.block_rows == 1:
        return Advice("rows", "the data is small, so its blocks have one row and both orders need the same requests")
    if not load.fits:
        need_gib = load.used_bytes * 1.1 / 2**30
        return Advice("rows", f"blocks needs data.cache_gib of at least {math.ceil(need_gib * 10) / 10:g} per host")
    if rows.requests < 2 * blocks.requests:
        shared = f"{load.hosts_per_block} hosts read each block"
        near = "the data is small, so rows of a batch that are near to each other share a request"
        return Advice("rows", f"blocks saves little: {shared if load.hosts_per_block > 1 else near}")
    return Advice("blocks", f"{_short(blocks.requests)} instead of {_short(rows.requests)} requests per step")


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


if TYPE_CHECKING:
    from rich.console import RenderableType

HEADINGS = ("data.shuffle", "requests/step", "bytes/step", "$ per 1,000 steps", "$ of the run")


@dataclass(frozen=True)
class StorageReads:
    """The requests of a run for both orders, and the recommended one."""

    load: ReadLoad
    chosen: str  # data.shuffle of the job
    orders: tuple[StepReads, StepReads]
    advice: Advice

    @classmethod
    def of(cls, load: ReadLoad, chosen: str) -> StorageReads:
        """Return the requests of a run whose job has the order `chosen`."""
        return cls(load, chosen, (step_reads(load, "rows"), step_reads(load, "blocks")), advice(load))

    @property
    def title(self) -> str:
        hosts = "one host" if self.load.hosts == 1 else f"{self.load.hosts} hosts together"
        return f"Requests to the bucket, {hosts}"

    @property
    def recommendation(self) -> str:
        """One line, such as `recommended: data.shuffle=blocks: 0.9 instead of 70 requests per step`."""
        text = f"data.shuffle={self.advice.shuffle}: {self.advice.reason}"
        return f"{'as recommended' if self.chosen == self.advice.shuffle else 'recommended'}: {text}"

    @property
    def notes(self) -> list[str]:
        """What the numbers assume."""
        price = request_price(self.load.protocol)
        size = Bytes(self.load.data_bytes)
        known = f" The data is not open: {size} of tokens are assumed." if self.load.is_assumed else ""
        dollars = "" if price is None else f" Dollars: reads at the list price of {price.name}, {price.date}."
        return [f"A step of the first epoch.{known}{dollars}"]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the cells of each order, below `HEADINGS`."""
        return [
            (
                f"{one.shuffle}{' (this job)' if one.shuffle == self.chosen else ''}",
                f"{one.requests:,.1f}" if one.requests < 100 else f"{one.requests:,.0f}",
                str(Bytes(round(one.read_bytes))),
                _usd(one.usd_per_1000_steps),
                _usd(one.usd_of_run),
            )
            for one in self.orders
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, the recommendation, and the source of the price."""
        price = request_price(self.load.protocol)
        return {
            "hosts": self.load.hosts,
            "shuffle": self.chosen,
            "orders": [one.to_json() for one in self.orders],
            "recommended": self.advice.shuffle,
            "reason": self.advice.reason,
            "price": None if price is None else {"name": price.name, "date": price.date, "source": price.source},
        }


def storage_table(reads: StorageReads) -> RenderableType:
    """Return the table with its title, the recommendation and the notes."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    # Columns in which no order of the rows has a value are omitted.
    shown = [n for n in range(len(HEADINGS)) if any(cells[n] != "-" for cells in reads.cells())]
    for n in shown:
        table.add_column(HEADINGS[n], justify="left" if n == 0 else "right", no_wrap=True)
    for cells in reads.cells():
        table.add_row(*(cells[n] for n in shown))
    better = reads.chosen != reads.advice.shuffle
    return Group(
        Text(reads.title, style="bold"),
        table,
        Text(reads.recommendation, style="yellow" if better else "green"),
        *(Text(note, style="dim") for note in reads.notes),
    )


def _usd(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1e-4:
        return "< 0.0001"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"
