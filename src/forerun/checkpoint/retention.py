"""The rules that select which checkpoints are kept: the newest, one every N steps, and the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.checkpoint.log import Commit


@dataclass(frozen=True)
class Retention:
    """Rules for the checkpoints to keep. A checkpoint is kept if any of the three rules selects it.

    Args:
      last: number of newest checkpoints to keep.
      every: keep checkpoints whose step is a multiple of this; None: this rule selects none.
      best: number of checkpoints with the lowest `figure` to keep. Those without a finite figure are never selected.
      figure: key of the record that ranks checkpoints.
    """

    last: int
    every: int | None = None
    best: int = 0
    figure: str = "loss"

    def kept(self, commits: Sequence[Commit]) -> list[Commit]:
        """Return the commits to keep, by ascending number.

        Earlier commits with a step not below that of the newest are not kept: the run was rewound after them.
        """
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
        """Return the figure of a commit, or infinity if it has no finite one."""
        value = commit.record.get(self.figure)
        finite = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if finite else math.inf  # type: ignore[arg-type]
