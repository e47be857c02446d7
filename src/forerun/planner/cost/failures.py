"""Goodput of a long run whose hosts fail: the share of the time that is spent in steps whose result is kept.

Failures are random, with a known mean time between them, and also occur during a recovery. After each one, the run
resumes from the newest checkpoint that was written completely. `goodput` is exact for these assumptions; a test
compares it with simulated failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import ASSUMPTIONS, Assumptions, Saves, saves_of, young_daly

DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Recovery:
    """The seconds after a failure until the run makes steps again.

    Attributes:
      replace: until another host takes the place of the failed one.
      wait: the part of it after which a run continues with fewer slices, if it may (`mesh.slice_wait_seconds`).
      resume: restart of the workers, compile, and reading the checkpoint.
    """

    replace: float
    wait: float
    resume: float

    @property
    def with_all(self) -> float:
        """The seconds of a recovery that waits for the other host."""
        return self.replace + self.resume


@dataclass(frozen=True)
class FailureEstimate:
    """How failures affect a run.

    Attributes:
      hosts: hosts, or GPUs, of which each one fails.
      between_seconds: mean time between failures of the run.
      pause_seconds, write_seconds: of a save, see `Saves`.
      recovery_seconds: from a failure to the first step after it, if the run waits for another host.
      every: steps between saves with the highest goodput, by Young and Daly.
      goodput: with `every`.
      planned_goodput: with the job's own `checkpoint.every`.
      fewer_slices_goodput: with `every`, for a run that continues with fewer slices; None for other runs.
    """

    hosts: int
    between_seconds: float
    pause_seconds: float
    write_seconds: float
    recovery_seconds: float
    every: int
    goodput: float
    planned_goodput: float
    fewer_slices_goodput: float | None = None


def goodput(interval: float, stall: float, write: float, recovery: float, between: float) -> float:
    """Return the share of the time that is spent in steps whose result is kept.

    From a recovery to the next failure, the k-th save is complete after k (interval + stall) + write. So the expected
    number of saves is a geometric series. The time from one recovery to the next has the mean between *
    exp(recovery / between), because a recovery starts again if it is interrupted.

    Args:
        interval: Seconds of steps between saves.
        stall: Seconds for which a save stops the steps.
        write: Seconds to write the save afterwards, while the steps continue. At most `interval + stall`.
        recovery: Seconds from a failure to the first step after it.
        between: Mean seconds between failures.
    """
    if (recovery + write) / between > 700:  # exp overflows
        return 0.0
    series = math.exp((recovery + write) / between) * math.expm1(min(700.0, (interval + stall) / between))
    return interval / between / series


def fewer_slices_goodput(
    slices: int, least: int, interval: float, stall: float, write: float, recovery: Recovery, between: float
) -> float:
    """Return the goodput of a run that continues with fewer slices, relative to the speed of all slices.

    An approximation: each slice but the first is absent for an independent share of the time. A slice that returns
    stops the run once more, after a save. The run waits if the first slice is lost, or more than the job permits.

    Args:
        slices: Slices of the run.
        least: Slices with which it may continue (`mesh.min_slices`).
        interval, stall, write, between: As for `goodput`.
        recovery: The seconds after a failure.
    """
    waiting = goodput(interval, stall, write, recovery.with_all, between)
    absent = recovery.replace - recovery.wait - recovery.resume  # steps on fewer slices, in seconds
    if least >= slices or absent <= 0:  # the slice returns before the run has continued without it
        return waiting
    others, away = slices - 1, absent / (absent + between * slices)
    chances = [
        math.comb(others, lost) * away**lost * (1 - away) ** (others - lost) for lost in range(slices - least + 1)
    ]
    speed = sum(chance * (slices - lost) / slices for lost, chance in enumerate(chances))
    twice = recovery.wait + 2 * recovery.resume + stall + write
    mixed = recovery.with_all / slices + twice * (slices - 1) / slices
    return speed * goodput(interval, stall, write, mixed, between)


def failures_of(verdict: FitResult, assumptions: Assumptions = ASSUMPTIONS) -> FailureEstimate | None:
    """Return how failures affect the run, or None if the job does not fit.

    Args:
        verdict: The result of compiling the job for a slice.
        assumptions: Times of failures, recoveries and saves.
    """
    if verdict.step is None:
        return None
    question, mesh = verdict.question, verdict.question.job.mesh
    slices = question.mesh_shape().slices
    gpu = question.slice.platform == "gpu"
    return failure_estimate(
        verdict.step.mid_seconds,
        saves_of(verdict, assumptions),
        question.devices if gpu else question.hosts,
        assumptions.gpu_failure_days if gpu else assumptions.tpu_host_failure_days,
        slices=slices,
        least=slices if mesh.min_slices is None else mesh.min_slices,
        slice_wait=mesh.slice_wait_seconds,
        assumptions=assumptions,
    )


def failure_estimate(
    step: float,
    saves: Saves,
    hosts: int,
    host_days: float,
    *,
    slices: int = 1,
    least: int = 1,
    slice_wait: float = 0.0,
    assumptions: Assumptions = ASSUMPTIONS,
) -> FailureEstimate:
    """Return how failures affect a run.

    Args:
        step: Seconds of a step.
        saves: The checkpoints of the run. Reading one is assumed to take as long as writing it.
        hosts: Hosts, or GPUs, of the run.
        host_days: Mean days between failures of each.
        slices, least: Slices of the run, and those with which it may continue.
        slice_wait: Seconds for which a lost slice is waited for.
        assumptions: Times of a recovery.
    """
    between = host_days * DAY_SECONDS / hosts
    pause, write = saves.pause_seconds, saves.write_seconds
    every = young_daly(step, pause_seconds=pause, write_seconds=write, between_seconds=between)
    resume = assumptions.restart_seconds + assumptions.compile_seconds + write
    recovery = Recovery(assumptions.replace_seconds, slice_wait, resume)

    def times(steps: int) -> tuple[float, float, float]:
        return steps * step, saves.stall_seconds(steps * step), min(write, steps * step)

    return FailureEstimate(
        hosts=hosts,
        between_seconds=between,
        pause_seconds=pause,
        write_seconds=write,
        recovery_seconds=recovery.with_all,
        every=every,
        goodput=goodput(*times(every), recovery.with_all, between),
        planned_goodput=goodput(*times(saves.every), recovery.with_all, between),
        fewer_slices_goodput=fewer_slices_goodput(slices, least, *times(every), recovery, between)
        if least < slices
        else None,
    )
