"""`cache_teacher` and `plan_teacher_cache`: store the logits of a job's teacher, or predict what that costs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.reporter import LineReporter, Reporter
from forerun.units import Bytes, Seconds, Usd
from forerun.verbs.option_types import File, Providers, Slices, Zone

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.planner.compile.fit_result import FitResult
    from forerun.planner.compile.request import Impossible
    from forerun.planner.cost.job_cost import TeacherCost
    from forerun.verbs.write_cache import TeacherCache


def cache_teacher(job: Job | str | os.PathLike[str], *, reporter: Reporter | None = None) -> TeacherCache:
    """Run the teacher of a job once over all rows, and store its top logits in the folder `distil.cache`.

    A cache that exists is completed; damaged parts are computed again.

    Args:
      job: a job with `distil.teacher` and `distil.cache`, or the path of a job file
      reporter: receives the progress; default: a display that fits the notebook or the terminal

    Returns:
      The folder, the layout of the cache, the number of shards that were written, and the time.

    Raises:
      UserError: The job has no teacher, or the folder holds the cache of another teacher or other data.
    """
    from forerun.resolve.resolve_model import resolve_model
    from forerun.supervise.free_tpu import require_free_tpu_for
    from forerun.track.display.make_display import make_display
    from forerun.verbs.job_files import prepared
    from forerun.verbs.write_cache import write_cache

    resolved = resolve_model(prepared(job))
    require_free_tpu_for(resolved.job.device, LineReporter(sys.stdout))
    with reporter or make_display(sys.stdout) as display:
        return write_cache(resolved, display)


@dataclass(frozen=True)
class TeacherCachePlan:
    """The size of a teacher cache, and the time and the cost of computing it on slices.

    Attributes:
      description: rows, tokens, logits and bytes of the cache, in one line.
      rows: the number of rows.
      results: for each slice the compiled result, and the bill, or None if the teacher does not fit.
      impossible: slices for which the program cannot be built.
    """

    description: str
    rows: int
    results: tuple[tuple[FitResult, TeacherCost | None], ...]
    impossible: tuple[Impossible, ...]

    @property
    def fits(self) -> bool:
        """Whether the teacher fits at least one slice."""
        return any(result.fits for result, _ in self.results)

    def __str__(self) -> str:
        lines = [f"cache: {self.description}", *(impossible.text for impossible in self.impossible)]
        for result, cost in self.results:
            if idle := result.question.idle_text():
                lines.append(idle)
            lines.append(f"{result.question.slice.name}: {_cost_text(result, cost)}")
        note = (
            "before the first batch: start and compile as in forerun plan, and the teacher's files. Not counted: "
            "shards are written while the teacher runs, so a slow disk costs time; on spot, a preemption and the wait "
            "after it"
        )
        return "\n".join([*lines, note])


def _cost_text(result: FitResult, cost: TeacherCost | None) -> str:
    memory = f"{Bytes(result.memory.peak_bytes)} of {Bytes(result.limit_bytes)} memory"
    if cost is None:
        return f"does not fit, {memory}; a smaller micro_batch may"
    low, mid, high = (Seconds(3600 * hours) for hours in (cost.hours.low, cost.hours.mid, cost.hours.high))
    offers = [("on demand", cost.on_demand), ("on spot", cost.spot)]
    prices = [f"{Usd(offer.usd.mid)} {capacity}" for capacity, offer in offers if offer]
    return (
        f"{mid} ({low} to {high}), {cost.begin_seconds} of it before the first batch, "
        f"{' or '.join(prices) or 'no price is known'}; "
        f"{cost.batches} batches of {result.question.job.batch} rows, {memory}"
    )


def plan_teacher_cache(
    job: Job | str | os.PathLike[str],
    *,
    on: Slices,
    zone: Zone | None = None,
    provider: Providers = (),
    prices: File | None = None,
    progress: bool = True,
) -> TeacherCachePlan:
    """Compile the teacher of a job for slices, and predict the size, the time and the cost of its cache.

    Args:
      job: a job with `distil.teacher` and `distil.cache`, or the path of a job file
      on: only predict size, time and price on these slices, for example v6e-1
      zone: with `on`: use the prices of this zone (default: the cheapest)
      provider: use only prices of these providers, for example gcp,lambda (default: the cheapest)
      prices: with `on`: use the prices in this file instead of list prices
      progress: print progress to stderr
    """
    from forerun.hardware.prices import provider_names
    from forerun.planner.compile.pool import CompileProgress, answers
    from forerun.planner.compile.request import slices_named
    from forerun.planner.compile.result_cache import cached_fit_result
    from forerun.planner.cost.job_cost import Tariff, possible_slices, teacher_cost, teacher_request
    from forerun.resolve.job_corpus import open_corpus
    from forerun.resolve.resolve_model import resolve_model
    from forerun.verbs.job_files import prepared
    from forerun.verbs.write_cache import described, layout_of, require_folder

    resolved = resolve_model(prepared(job))
    slices = slices_named([on] if isinstance(on, str) else list(on))
    tariff = Tariff(zone, None if prices is None else os.fspath(prices), providers=provider_names(provider))
    tariff.check()
    slices, impossible = possible_slices(resolved.job, slices)
    require_folder(resolved.job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    layout = layout_of(resolved, corpus)
    requests = [teacher_request(resolved, one) for one in slices]
    with CompileProgress(requests, plain_lines=progress) as compile_progress:
        results = answers(requests, compile_progress.phase, cached_fit_result)
    return TeacherCachePlan(
        described(layout),
        layout.rows,
        tuple((result, teacher_cost(result, layout.rows, tariff)) for result in results),
        tuple(impossible),
    )
