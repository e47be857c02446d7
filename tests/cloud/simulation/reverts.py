"""Defects that were fixed. Each can be brought back, to show that the simulation finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Revert:
    """A defect.

    Attributes:
      item: the item of the list of work that fixed it.
      apply: changes forerun's modules; the stack restores them.
    """

    item: int
    defect: str
    apply: Callable[[ExitStack], None]


REVERTS: dict[str, Revert] = {}


@contextmanager
def reverted(name: str | None) -> Iterator[None]:
    """Bring a defect back for a while; None: change nothing."""
    with ExitStack() as stack:
        if name is not None:
            REVERTS[name].apply(stack)
        yield
