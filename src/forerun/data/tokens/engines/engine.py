"""The interface of engines, which build units: worker processes of this machine, or the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from forerun.data.tokens.unit import Unit

ATTEMPTS = 3  # for a unit whose worker dies


class Event(NamedTuple):
    """A message about a unit.

    `kind` is progress, done, bad, error, storage, bug or died. The last one means that the worker died and the unit
    is not tried again.
    """

    kind: str
    unit: Unit
    content: Any


class UnitEngine(Protocol):
    """A builder of units. It starts units in order. Their events arrive in any order."""

    def events(self) -> Iterator[Event]:
        """Start the work and yield events until every unit is finished or has failed."""

    def up_to(self, unit: Unit) -> None:
        """Start no more units after this one."""

    def end(self) -> None:
        """Stop all work. Units that are not finished are abandoned."""


class StartEngine(Protocol):
    """A function that returns an engine for units, a task in types of JSON, and a number of workers."""

    def __call__(self, units: Sequence[Unit], task: dict[str, Any], workers: int | None) -> UnitEngine: ...


def in_order(units: list[Unit]) -> None:
    """Sort units that wait, so that the next one is the last of the list."""
    units.sort(key=lambda one: -one.number)
