"""Which checkpoints stay: the last, one every so many steps, and the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.checkpoint.log import Commit


@dataclass(frozen=True)
class Retention:
    """A checkpoint stays if any of the three rules keeps it.

    Args:
      last: the newest so many.
      every: each whose step is a multiple of this.
      best: the so many whose record has the lowest `figure`; without a finite one, a checkpoint is not among them.
    """

    last: int
    every: int | None = None
    best: int = 0
    figure: str = "loss"

    def kept(self, commits: Sequence[Commit]) -> list[Commit]:
        """Of `commits`, by ascending number. What lies ahead of the newest is left from before a rewind: it goes."""
        if not commits:
            return []
        newest = commits[-1]
        line = [commit for commit in commits if commit is newest or commit.step < newest.step]
        ranked = sorted((self._figure(commit), -commit.number) for commit in line)
        best = {-number for figure, number in ranked[: self.best] if math.isfinite(figure)}
        return [
            commit
            for age, commit in enumerate(reversed(line))
            if age < self.last or commit.number in best or (self.every and commit.step % self.every == 0)
        ][::-1]

    def _figure(self, commit: Commit) -> float:
        value = commit.record.get(self.figure)
        finite = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if finite else math.inf  # type: ignore[arg-type]
