"""Why a search stopped: by a proof, by a prediction, or because it was told to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from forerun.planner.search.regression import Estimate
from forerun.planner.search.strategy import Known, Rejection, Strategy

Cause = Literal["all compiled", "bound", "prediction", "limit", "interrupted"]


@dataclass(frozen=True)
class SearchEnding:
    """The reason why a search stopped.

    Attributes:
      cause: `all compiled`: no candidate is left. `bound`: it is proven that none of the others can win. `prediction`:
        none of the others is expected to win. `limit`: the largest number of compiles was reached. `interrupted`: the
        user pressed Ctrl-C.
      rejections: the number of candidates that were not compiled, by reason.
      open_count: the number of candidates that were not compiled although they may win.
      nearest: the predicted step of the nearest candidate on the slice of the best plan, relative to the best step;
        None if no candidate there was rejected by its predicted time.
    """

    cause: Cause
    rejections: Counter[Rejection]
    open_count: int = 0
    nearest: Estimate | None = None

    def text(self) -> str:
        """Return the reason as a phrase."""
        left = self.rejections.total() + self.open_count
        if self.cause == "all compiled":
            return "all candidates that may fit are compiled"
        if self.cause == "interrupted":
            return f"interrupted; {self.open_count} of the {left} candidates left may be better"
        if self.cause == "limit":
            return f"the limit of compiles is reached; {self.open_count} of the {left} candidates left may be better"
        if self.cause == "bound":
            return f"none of the {left} candidates left can win (bound)"
        if self.nearest is None:
            return f"none of the {left} candidates left is expected to win (a prediction, no proof)"
        larger = " or too large" if self.rejections[Rejection.MEMORY_PREDICTION] else ""
        distance = f"the {left} candidates left are predicted to be {_slower(self.nearest)}{larger}"
        return f"{distance} (a prediction, no proof; --search-all compiles them)"

    def reason_counts(self) -> list[tuple[str, int]]:
        """Return why candidates were not compiled, with their numbers, most frequent first."""
        counts = [(reason.value, count) for reason, count in self.rejections.most_common()]
        return counts + ([("may be better, but the search was stopped", self.open_count)] if self.open_count else [])

    def to_dict(self) -> dict[str, Any]:
        """Return the reason for JSON."""
        nearest = self.nearest
        return {
            "by": self.cause,
            "text": self.text(),
            "not_compiled": dict(self.reason_counts()),
            "nearest_slower_by": None if nearest is None else round(nearest.mid - 1, 4),
            "nearest_error": None if nearest is None else round(nearest.deviation, 4),
        }


def _slower(nearest: Estimate) -> str:
    """Return how much slower the nearest candidate is, with its error."""
    percent, error = 100 * (nearest.mid - 1), 100 * nearest.deviation
    if percent < 0.5:
        return f"not better than the best plan by more than 1 % (the nearest: {percent:+.1f} % ± {error:.1f} %)"
    return f"slower by at least {percent:.0f} % (± {error:.0f} %)"


def ending_of(strategy: Strategy, known: Known, *, interrupted: bool) -> SearchEnding:
    """Return why a search with these results stopped."""
    left = [one for one in strategy.space.candidates if one not in known]
    if not left:
        return SearchEnding("all compiled", Counter())
    reasons = strategy.rejected(known)
    wanted = {one for one in strategy.proposals(known) if one not in known}
    rejections = Counter(reasons[one] for one in left if one in reasons and one not in wanted)
    open_count = len(left) - rejections.total()
    if interrupted or open_count:
        return SearchEnding("interrupted" if interrupted else "limit", rejections, open_count)
    cause: Cause = "bound" if all(reason.is_proof for reason in rejections) else "prediction"
    return SearchEnding(cause, rejections, nearest=strategy.nearest(known))
