"""Calibrate the ranges of predicted step times: one scale for the uncertainty of all parts, from the development runs.

python bench/accuracy/ranges.py            # needs the programs of predict.py; prints the scale and the coverage
python bench/accuracy/ranges.py --write    # also writes the section "Ranges" of docs/explanation/accuracy.md
python bench/accuracy/ranges.py --own-options    # the programs that forerun compiles with its own options

The scale is chosen so that SHARE of the runs are inside their ranges, rounded up to 0.05. It is tested by leaving out
one family after the other: the scale that the other families give is applied to the runs of that family.
"""

from __future__ import annotations

import gzip
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from more_runs import development_runs
from predict import scheduled_path
from report import write_blocks
from runs import Run, runs

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import step_time, tpu_simulation
from forerun.planner.time.step_time import SCALE, RangeTerm, TimeRange, time_range
from forerun.planner.time.tpu_range import range_terms

SHARE = 0.88
STEP = 0.05
FLAT = TimeRange(0.75, 1.25)


@dataclass(frozen=True)
class RangedRun:
    """A published run with its prediction and the causes of its uncertainty."""

    run: Run
    seconds: float
    floor_seconds: float
    terms: Sequence[RangeTerm]

    def range_at(self, scale: float) -> TimeRange:
        found = time_range(self.terms, scale)
        return TimeRange(max(found.low_factor, self.floor_seconds / self.seconds), found.high_factor, found.reasons)

    def covers(self, found: TimeRange) -> bool:
        return found.low_factor <= self.run.seconds / self.seconds <= found.high_factor

    def least_scale(self) -> float:
        """Return the smallest scale whose range has the published time; infinite if it is below the floor."""
        if self.run.seconds < self.floor_seconds:
            return math.inf
        ratio, unit = self.run.seconds / self.seconds, time_range(self.terms, 1.0)
        return (ratio - 1) / (unit.high_factor - 1) if ratio >= 1 else (1 / ratio - 1) / (1 / unit.low_factor - 1)


def ranged(run: Run) -> RangedRun:
    module, slice = parse(gzip.decompress(scheduled_path(run).read_bytes()).decode()), slice_named(run.slice)
    step = step_time(module, slice)
    terms = range_terms(tpu_simulation(module, slice), step.mid_seconds, step.doubts)
    return RangedRun(run, step.mid_seconds, step.floor_seconds, terms)


def scale_for(found: Sequence[RangedRun], share: float = SHARE) -> float:
    """Return the scale at which at least `share` of the runs are inside their ranges, rounded up."""
    scales = sorted(one.least_scale() for one in found)
    least = scales[math.ceil(share * len(scales)) - 1]
    return math.ceil(least / STEP - 1e-9) * STEP if math.isfinite(least) else least


def half_width(found: TimeRange) -> float:
    return (found.high_factor - found.low_factor) / 2


def lines(found: Sequence[RangedRun]) -> list[str]:
    """Return the coverage and the mean width of the ranges, and those of a flat range."""
    families = sorted({one.run.family for one in found})
    left_out = []
    for family in families:
        scale = scale_for([one for one in found if one.run.family != family])
        left_out += [one.covers(one.range_at(scale)) for one in found if one.run.family == family]
    now = [one.range_at(SCALE) for one in found]
    widths = [half_width(one) for one in now]
    inside = sum(one.covers(range_) for one, range_ in zip(found, now, strict=True))
    flat = sum(one.covers(FLAT) for one in found)
    n = len(found)
    return [
        f"- Ranges from the parts, scale {SCALE:g}: {inside} of {n} runs inside ({inside / n:.0%}), mean width "
        f"± {statistics.mean(widths):.1%}, from ± {min(widths):.1%} to ± {max(widths):.1%}.",
        f"- Scale from the other families only: {sum(left_out)} of {n} inside ({sum(left_out) / n:.0%}).",
        f"- Flat range of 25 %: {flat} of {n} inside ({flat / n:.0%}), width ± 25.0%.",
    ]


def main(arguments: list[str]) -> int:
    wanted = [run for run in (*runs(), *development_runs()) if not run.unlike]
    if "--own-options" in arguments:
        wanted = [run.as_forerun_compiles() for run in wanted]
    found = [ranged(run) for run in wanted if scheduled_path(run).exists()]
    for one in sorted(found, key=lambda one: one.least_scale()):
        now = one.range_at(SCALE)
        causes = ", ".join(f"{x.cause} {x.share:.0%} -{x.shorter:.1%} +{x.longer:.1%}" for x in now.reasons)
        print(
            f"{one.run.name[:44]:44} {one.seconds / one.run.seconds - 1:+7.1%} "
            f"({now.low_factor - 1:+.0%} {now.high_factor - 1:+.0%}) scale {one.least_scale():.2f}  {causes}"
        )
    print(f"{len(found)} of {len(wanted)} runs; scale for {SHARE:.0%}: {scale_for(found):.2f}")
    text = "\n".join(lines(found)) + "\n"
    print(text)
    if "--write" in arguments:
        write_blocks({"ranges": text})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
