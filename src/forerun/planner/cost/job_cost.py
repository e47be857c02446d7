"""Hours, dollars and written bytes of a complete job, from the time of one step and the dated price table.

On demand, the billed time consists of the start, the steps and the saves. On spot, preemptions add to it. The expected
time follows Daly (2006): failures are random, with a known mean time between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

from forerun.config.schema import Job, Mesh
from forerun.errors import UserError
from forerun.hardware.prices import Price, cheapest, check_providers, check_zone, prices
from forerun.hardware.slices import Slice
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest, Impossible
from forerun.planner.time.chip_model import host_bytes_per_second
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import Bytes, Seconds

SAVES = 10  # saves per run, if they are cheap
CHEAP = 0.01  # saves are cheap if their pauses take at most this share of the time
WASTE = 0.05  # share of the time; an interval that wastes more gets a warning
# Largest ratio of (save interval + restart) to the mean time between preemptions. Above it, a run hardly ever reaches
# its next save.
HOPELESS = 20


def _assumed(value: float, unit: str, meaning: str, source: str = "assumed, 2026-11") -> float:
    """Return a dataclass field with its documentation as metadata."""
    made: float = field(default=value, metadata={"unit": unit, "meaning": meaning, "source": source})
    return made


@dataclass(frozen=True)
class Assumptions:
    """All assumptions behind hours and dollars, except the step time and the prices."""

    start_seconds: float = _assumed(240, "s", "from the first billed second to the first line of the program")
    compile_seconds: float = _assumed(
        120, "s", "compile at the start", "assumed, 2026-11; 0.6B on v5e-8 took 209 s on two busy cores"
    )
    save_pause_seconds: float = _assumed(1, "s", "a save stops the run for this long, and for the copy to the host")
    bucket_bytes_per_second: float = _assumed(0.5e9, "B/s", "checkpoint bytes that one host writes or reads")
    metrics_bytes_per_line: float = _assumed(200, "B", "one line of metrics", "counted in a run, 2026-11")
    preemptions_per_hour: float = _assumed(
        0.25,
        "1/h",
        "preemptions of a spot slice",
        "assumed, 2026-11: no published rate was found; it differs by zone, size and week",
    )
    wait_seconds: float = _assumed(900, "s", "wait for the next spot slice after a preemption; not billed")
    tpu_host_failure_days: float = _assumed(
        1250,
        "d",
        "mean time between failures of one TPU host",
        "0.08 % of TPU v4 machines fail each day: Zu et al., NSDI 2024, seen in 2026-11; assumed for all generations, "
        "without cables and software",
    )
    gpu_failure_days: float = _assumed(
        2112,
        "d",
        "mean time between failures that one GPU, with its part of the machine and network, adds",
        "419 interruptions of 16,384 H100 in 54 days: Meta's report on Llama 3, 2024, seen in 2026-11",
    )
    replace_seconds: float = _assumed(900, "s", "wait for another host or slice after a failure")
    restart_seconds: float = _assumed(
        36,
        "s",
        "restart of all workers after a failure, without compile and checkpoint",
        "measured in 2026-11 with two tiny slices on one busy machine: bench/slice_recovery.py",
    )


ASSUMPTIONS = Assumptions()


def assumption_rows() -> list[tuple[str, str, str, str]]:
    """Return (name, value with its unit, meaning, source) of each assumption, for reports."""
    return [
        (
            one.name,
            _with_unit(getattr(ASSUMPTIONS, one.name), one.metadata["unit"]),
            one.metadata["meaning"],
            one.metadata["source"],
        )
        for one in fields(ASSUMPTIONS)
    ]


def _with_unit(value: float, unit: str) -> str:
    return f"{value / 1e6:g} M{unit}" if value >= 1e6 else f"{value:g} {unit}"


@dataclass(frozen=True)
class Tariff:
    """Zone, providers, prices and budget of a job."""

    zone: str | None = None  # None: the cheapest zone
    prices_file: str | None = None
    max_usd: float | None = None
    providers: tuple[str, ...] = ()  # empty: the cheapest provider of each machine

    def check(self) -> None:
        """Raise an error for an unknown zone or provider or an invalid prices file, before anything is compiled."""
        known = prices(self.prices_file)
        if self.zone is not None:
            check_zone(self.zone, known)
        check_providers(self.providers, known)

    def price_of(self, slice_: Slice, *, spot: bool = False) -> Price | None:
        """Return the lowest price of a slice or GPU machine, or None if no price is known."""
        return cheapest(
            slice_.chip.name,
            self.zone,
            spot,
            slice_.hosts,
            self.prices_file,
            chips_per_host=slice_.chips // slice_.hosts,
            providers=self.providers,
        )


@dataclass(frozen=True)
class Range:
    """A predicted value with its lower and upper estimate."""

    low: float
    mid: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.mid * factor, self.high * factor)

    def as_dict(self) -> dict[str, float]:
        return {"low": self.low, "mid": self.mid, "high": self.high}


@dataclass(frozen=True)
class Offer:
    """The cost of a job with one price, on demand or spot: `usd` is billed hours x chips x the price."""

    price: Price
    usd: Range


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run."""

    every: int  # steps between saves
    count: int
    state_bytes: Bytes  # written at every save, with each array counted once
    pause_seconds: Seconds  # the run is stopped for this time
    write_seconds: Seconds  # then training continues while the host writes

    def wait_seconds(self, interval_seconds: float) -> float:
        """Return how long a save waits for the previous one, if that is still being written when the next is due."""
        return max(0.0, self.write_seconds - interval_seconds)

    def stall_seconds(self, interval_seconds: float) -> float:
        """Return how long a save stops the run. The first save stops it only for the pause."""
        return self.pause_seconds + self.wait_seconds(interval_seconds)


@dataclass(frozen=True)
class JobCost:
    """Time, cost and checkpoints of one job on one slice that it fits."""

    hours: Range  # on demand
    on_demand: Offer | None  # None: no price is known
    spot: Offer | None  # None: no price is known, or preempted too often to finish
    spot_hours: Range | None  # including the wait for new slices. None: preempted too often to finish.
    preemptions: float  # expected number on spot
    steps_lost_per_preemption: float
    spot_overhead: float  # (billed time on spot) / (time without preemptions) - 1
    best_every: int  # steps between saves with the least expected time on spot
    save_waste: float  # (expected time on spot) / (expected time with best_every) - 1
    saves: Saves
    written_bytes: Bytes  # in the complete run
    kept_bytes: Bytes  # on disk at the end

    def within(self, max_usd: float | None) -> bool:
        """Return whether the cost on demand or on spot is within the limit. None is no limit."""
        offers = [offer for offer in (self.on_demand, self.spot) if offer]
        return max_usd is None or any(offer.usd.mid <= max_usd for offer in offers)


def job_cost_of(verdict: FitResult, tariff: Tariff) -> JobCost | None:
    """Return the time and cost of a job, or None if it does not fit: then its step time is unknown."""
    if verdict.step is None:
        return None
    job = verdict.question.job
    assert job.steps is not None, "a question's job is resolved"
    saves = saves_of(verdict)
    # The run stops if one of its slices is preempted.
    slices = verdict.question.mesh_shape().slices
    assumptions = replace(ASSUMPTIONS, preemptions_per_hour=ASSUMPTIONS.preemptions_per_hour * slices)
    run = RunCost(job.steps, saves, assumptions)
    best = RunCost(job.steps, saves_of(verdict, assumptions, best=True), assumptions)
    hours = over_step(verdict, lambda step: run.seconds(step) / 3600)
    billed = over_step(verdict, lambda step: run.spot_seconds(step) / 3600)
    mid = verdict.step.mid_seconds
    preemptions = billed.mid * assumptions.preemptions_per_hour if math.isfinite(billed.mid) else math.inf
    waiting = assumptions.preemptions_per_hour * assumptions.wait_seconds / 3600
    lines = math.ceil(job.steps / job.log_every)
    metrics_bytes = lines * assumptions.metrics_bytes_per_line
    possible = math.isfinite(billed.high)
    return JobCost(
        hours=hours,
        on_demand=offer(verdict, tariff, hours, spot=False),
        spot=offer(verdict, tariff, billed, spot=True) if possible else None,
        spot_hours=billed.times(1 + waiting) if possible else None,
        preemptions=preemptions,
        steps_lost_per_preemption=min(saves.every, job.steps) / 2,
        spot_overhead=billed.mid / hours.mid - 1,
        best_every=best.saves.every,
        save_waste=_waste(run.spot_seconds(mid), best.spot_seconds(mid)),
        saves=saves,
        written_bytes=Bytes(saves.count * saves.state_bytes + metrics_bytes),
        kept_bytes=Bytes(min(saves.count, job.checkpoint.keep) * saves.state_bytes + metrics_bytes),
    )


def saves_of(verdict: FitResult, assumptions: Assumptions = ASSUMPTIONS, *, best: bool = False) -> Saves:
    """Return the saves of the job. With `best`, return those with the interval that `auto` would choose."""
    question, memory = verdict.question, verdict.memory
    job, devices = question.job, question.devices
    assert job.steps is not None, "a question's job is resolved"
    per_device: float = memory.weights_bytes + memory.optimizer_bytes
    mesh = question.mesh_shape()
    copies = mesh.data * mesh.slices
    state = Bytes(int(per_device) * devices // copies)
    if verdict.saved_bytes is not None:
        state, per_device = Bytes(verdict.saved_bytes), verdict.saved_bytes * copies / devices
    copy_seconds = per_device / host_bytes_per_second(question.slice.chip)
    pause = Seconds(assumptions.save_pause_seconds + copy_seconds)
    # Of several slices, only the hosts of the first one write: the others have copies.
    write = Seconds(state / (question.hosts // mesh.slices) / assumptions.bucket_bytes_per_second)
    every = job.checkpoint.every
    if best or every == "auto":
        assert verdict.step is not None
        chosen = RunCost(job.steps, Saves(1, job.steps, state, pause, write), assumptions)
        every = aligned(job, chosen.best_every(verdict.step.mid_seconds))
    count = math.ceil(job.steps / every)  # rounded up: the last step is always saved
    return Saves(every, count, state, pause, write)


def _waste(seconds: float, best_seconds: float) -> float:
    """Return the extra time as a share of the best time; 0 if even the best is infinite."""
    return max(0.0, seconds / best_seconds - 1) if math.isfinite(best_seconds) else 0.0


@dataclass(frozen=True)
class RunCost:
    """The time of a complete run as a function of the time of a step, in seconds."""

    steps: int
    saves: Saves
    assumptions: Assumptions = ASSUMPTIONS

    def work_seconds(self, step: float) -> float:
        """Return the time of all steps and saves, up to the end of the last write."""
        waits = (self.saves.count - 1) * self.saves.wait_seconds(self.saves.every * step)
        return self.steps * step + self.saves.count * self.saves.pause_seconds + waits + self.saves.write_seconds

    def seconds(self, step: float) -> float:
        """Return the time of a run without preemptions, including start and compile."""
        return self._begin_seconds + self.work_seconds(step)

    def spot_seconds(self, step: float) -> float:
        """Return the expected billed time with preemptions; infinite if a run would hardly ever reach its next save."""
        between = 3600 / self.assumptions.preemptions_per_hour
        work = self.work_seconds(step)
        interval = self.saves.every * step
        segment = min(work, interval + self.saves.stall_seconds(interval))
        restart = self._begin_seconds + self.saves.write_seconds  # reading a checkpoint takes as long as writing it
        if (segment + restart) / between > HOPELESS:
            return math.inf
        expected = between * math.exp(restart / between) * math.expm1(segment / between) * work / segment
        return self._begin_seconds + expected

    def best_every(self, step: float) -> int:
        """Return the number of steps between saves that loses the least time."""
        return best_interval(
            self.steps,
            step,
            pause_seconds=self.saves.pause_seconds,
            write_seconds=self.saves.write_seconds,
            between_seconds=3600 / self.assumptions.preemptions_per_hour,
        )

    @property
    def _begin_seconds(self) -> float:
        return self.assumptions.start_seconds + self.assumptions.compile_seconds


def over_step(verdict: FitResult, of: Callable[[float], float]) -> Range:
    """Return the range of a function of the step time, in seconds."""
    step = verdict.step
    assert step is not None
    return Range(of(step.low_seconds), of(step.mid_seconds), of(step.high_seconds))


def offer(verdict: FitResult, tariff: Tariff, billed_hours: Range, *, spot: bool) -> Offer | None:
    """Return the cost of `billed_hours` at the cheapest known price of the slice, or None if no price is known."""
    slice_ = verdict.question.slice
    price = tariff.price_of(slice_, spot=spot)
    if price is None:
        return None
    rate = price.usd_per_chip_hour_spot if spot else price.usd_per_chip_hour_on_demand
    assert rate is not None, "asked for spot, the table gives rows that have it"
    return Offer(price, billed_hours.times(rate * slice_.chips))


@dataclass(frozen=True)
class TeacherCost:
    """Time and cost of caching a teacher's logits."""

    batches: int
    begin_seconds: Seconds  # before the first batch: start, compile, and reading the teacher's weights
    hours: Range  # including begin_seconds
    on_demand: Offer | None  # None: no price is known
    spot: Offer | None  # does not count preemptions, which lose at most one shard each


def teacher_request(resolved: ResolvedJob, slice_: Slice) -> CompileRequest:
    """Return the request to compile the teacher's forward pass, with the job's micro-batch on every device."""
    job = resolved.job
    devices = slice_.used_devices(job.devices)
    per_device = job.micro_batch or max(1, job.batch // devices)
    changed = resolved.with_values(mesh=Mesh(), micro_batch=per_device, batch=per_device * devices)
    return CompileRequest(changed, slice_, recording=True)


def teacher_cost(verdict: FitResult, rows: int, tariff: Tariff) -> TeacherCost | None:
    """Return the time and cost of caching `rows` rows, or None if the teacher does not fit."""
    if verdict.step is None:
        return None
    batches = math.ceil(rows / verdict.question.job.batch)
    weights_bytes = verdict.memory.weights_bytes * verdict.question.devices  # the weights are split over the devices
    reading = weights_bytes / ASSUMPTIONS.bucket_bytes_per_second
    begin = Seconds(ASSUMPTIONS.start_seconds + ASSUMPTIONS.compile_seconds + reading)
    hours = over_step(verdict, lambda step: (begin + batches * step) / 3600)
    return TeacherCost(
        batches, begin, hours, offer(verdict, tariff, hours, spot=False), offer(verdict, tariff, hours, spot=True)
    )


def possible_slices(job: Job, slices: Sequence[Slice]) -> tuple[list[Slice], list[Impossible]]:
    """Split `slices` into those that can cache a teacher and the others; raise the first error if none can."""
    possible, impossible = [], []
    for one in slices:
        try:
            one.used_devices(job.devices)
            _require_one_host(one)
        except UserError as error:
            impossible.append(Impossible(one, error))
        else:
            possible.append(one)
    if not possible:
        raise impossible[0].error
    return possible, impossible


def _require_one_host(one: Slice) -> None:
    if one.hosts > 1:
        raise UserError(
            "E-PLAN-014",
            f"forerun cache runs on one host, and {one.name} has {one.hosts}",
            why="one process writes the teacher's logits, with all devices of its host",
            fix="--on v6e-8; training can read the folder on any slice",
        )


# ---- The number of steps between checkpoints: the default of `checkpoint.every`, and the cost of other values ----


def best_interval(
    steps: int, step_seconds: float, *, pause_seconds: float, write_seconds: float, between_seconds: float
) -> int:
    """Return the number of steps between saves that loses the least time.

    This is the interval of Young and Daly: sqrt(2 x pause of a save x mean time between failures). Two limits apply. No
    save begins before the previous one is written. A short run saves ten times if that costs at most 1 % of its time.

    Args:
        steps: Number of steps of the run.
        step_seconds: Time of one step.
        pause_seconds: Time for which a save stops the run.
        write_seconds: Time to write the save afterwards, while the run continues.
        between_seconds: Mean time between failures.
    """
    daly = _young_daly_seconds(pause_seconds, write_seconds, between_seconds)
    short = max(steps / SAVES * step_seconds, pause_seconds / CHEAP, write_seconds)
    return max(1, min(steps, round(min(daly, short) / step_seconds)))


def young_daly(step_seconds: float, *, pause_seconds: float, write_seconds: float, between_seconds: float) -> int:
    """Return the number of steps between saves that loses the least time in a run of any length."""
    return max(1, round(_young_daly_seconds(pause_seconds, write_seconds, between_seconds) / step_seconds))


def _young_daly_seconds(pause_seconds: float, write_seconds: float, between_seconds: float) -> float:
    return max(math.sqrt(2 * pause_seconds * between_seconds), write_seconds)


def lost_share(
    every: int, step_seconds: float, *, pause_seconds: float, write_seconds: float, between_seconds: float
) -> float:
    """Return the share of the time that is lost to saves and to steps repeated after failures."""
    interval = every * step_seconds
    stall = pause_seconds + max(0.0, write_seconds - interval)
    return stall / interval + interval / (2 * between_seconds)


def aligned(job: Job, every: int) -> int:
    """Return the interval, rounded up to a multiple of the evaluation interval if the best checkpoints are kept."""
    if not (job.checkpoint.keep_best and job.data.validation):
        return every
    evaluations = job.validation.every or job.checkpoint.evaluation_steps
    return -(-every // evaluations) * evaluations
