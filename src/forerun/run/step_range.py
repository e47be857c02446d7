"""The steps of a profile, such as `10:15`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.errors import UserError


@dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last`, both included. The first step of a run is 1."""

    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"steps {self.first} to {self.last}" if self.count > 1 else f"step {self.first}"

    def require_reached(self, steps: int) -> None:
        """Raise if the run ends before the last step of the range."""
        if self.last > steps:
            raise UserError(
                "E-RUN-085",
                f"--profile {self.first}:{self.last}, but the run has {steps} steps",
                why="the steps of a profile must be steps of the run",
                fix=f"--profile {max(1, steps - self.count + 1)}:{steps}",
            )

    def passed_error(self, step: int, steps: int) -> UserError:
        """Return the error for a run that has already reached `step`, at or after the first step of the range."""
        left = steps - step
        again = f"--profile {step + 1}:{step + min(left, self.count)}, or " if left > 0 else ""
        return UserError(
            "E-RUN-086",
            f"--profile {self.first}:{self.last}, but the run has already reached step {step}",
            why="the run resumes there, and does not repeat earlier steps",
            fix=f"{again}forerun profile JOB, which profiles a few steps without the run",
        )


def range_of(text: str) -> StepRange:
    """Return the range that `FIRST:LAST` or a single step means."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UserError(
            "E-RUN-084",
            f"--profile {text}: this is not a range of steps",
            why="a range is FIRST:LAST, the first step of a run is 1, and LAST is not below FIRST",
            fix=f"--profile {last}:{first}" if 1 <= last < first else "for example --profile 10:15",
        )
    return StepRange(first, last)
