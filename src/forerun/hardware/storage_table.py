"""The requests of a run to object storage as a table: `data.shuffle: rows` and `blocks`, and which one suits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.hardware.object_storage import Advice, ReadLoad, StepReads, advice, request_price, step_reads
from forerun.units import Bytes

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
