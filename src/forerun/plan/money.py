"""Hours, dollars and bytes written of a whole job, from the time of one step and the dated price table.

On demand a run pays for its start, its steps and its saves. On spot it also pays for what preemptions
take: the expected time is Daly's (2006) for failures that come at random with a known mean between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from forerun.hardware.prices import Price, cheapest, check_zone, prices
from forerun.plan.machine import machine_of
from forerun.plan.save_interval import aligned, best_interval
from forerun.plan.verdict import Verdict
from forerun.units import Bytes, Seconds

HOPELESS = 20  # mean times between preemptions from save to save: such a run would never get to the second


def _assumed(value: float, unit: str, meaning: str, source: str = "assumed, 2026-11") -> float:
    made: float = field(default=value, metadata={"unit": unit, "meaning": meaning, "source": source})
    return made


@dataclass(frozen=True)
class Assumptions:
    """Everything that hours and dollars rest on beside the step time and the prices."""

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
        "of a spot slice",
        "assumed, 2026-11: no published rate was found; it differs by zone, size and week",
    )
    wait_seconds: float = _assumed(900, "s", "for the next spot slice after a preemption; not billed")


ASSUMPTIONS = Assumptions()


def assumption_rows(assumptions: Assumptions = ASSUMPTIONS) -> list[tuple[str, str, str, str]]:
    """(name, value with its unit, meaning, source), for people."""
    return [
        (
            one.name,
            _with_unit(getattr(assumptions, one.name), one.metadata["unit"]),
            one.metadata["meaning"],
            one.metadata["source"],
        )
        for one in fields(assumptions)
    ]


def _with_unit(value: float, unit: str) -> str:
    return f"{value / 1e6:g} M{unit}" if value >= 1e6 else f"{value:g} {unit}"


@dataclass(frozen=True)
class Tariff:
    """Where the job may run and what it may cost. Without a zone the cheapest one is taken."""

    zone: str | None = None
    prices_file: str | None = None
    max_usd: float | None = None

    def check(self) -> None:
        """Mistakes in the zone and in the file, before anything is compiled."""
        known = prices(self.prices_file)
        if self.zone is not None:
            check_zone(self.zone, known)


@dataclass(frozen=True)
class Range:
    low: float
    mid: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.mid * factor, self.high * factor)

    def as_dict(self) -> dict[str, float]:
        return {"low": self.low, "mid": self.mid, "high": self.high}


@dataclass(frozen=True)
class Offer:
    """One way to pay: `usd` is billed hours x chips x the price."""

    price: Price
    usd_per_chip_hour: float
    usd: Range


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run. `state_bytes` are written at every save, each array once."""

    every: int
    count: int
    state_bytes: Bytes
    pause_seconds: Seconds  # the run stands still
    write_seconds: Seconds  # then it goes on while the host writes

    def wait_seconds(self, interval_seconds: float) -> float:
        """A save that is still being written when the next is due makes that one wait."""
        return max(0.0, self.write_seconds - interval_seconds)

    def stall_seconds(self, interval_seconds: float) -> float:
        """Of every save but the first, which finds nothing to wait for."""
        return self.pause_seconds + self.wait_seconds(interval_seconds)


@dataclass(frozen=True)
class Bill:
    """Of one job on one slice that holds it. `hours` are on demand; those of spot include waiting for slices."""

    hours: Range
    on_demand: Offer | None  # None: no price is known
    spot: Offer | None
    spot_hours: Range | None  # None: preempted too often to come through
    preemptions: float
    steps_lost_per_preemption: float
    spot_overhead: float  # billed time beyond the undisturbed run, as a share of it
    best_every: int  # steps between saves that lose least time on spot
    save_waste: float  # expected time on spot with the job's interval beyond that with the best, as a share of it
    saves: Saves
    written_bytes: Bytes  # in the whole run
    kept_bytes: Bytes  # at the end

    def within(self, max_usd: float | None) -> bool:
        """Some way to pay for it stays below the limit."""
        offers = [offer for offer in (self.on_demand, self.spot) if offer]
        return max_usd is None or any(offer.usd.mid <= max_usd for offer in offers)


def bill_of(verdict: Verdict, tariff: Tariff, assumptions: Assumptions = ASSUMPTIONS) -> Bill | None:
    """None where the job does not fit: then there is no step time."""
    if verdict.step is None:
        return None
    job = verdict.question.job
    assert job.steps is not None, "a question's job is concrete"
    saves = saves_of(verdict, assumptions)
    run = Run(job.steps, saves, assumptions)
    best = Run(job.steps, saves_of(verdict, assumptions, best=True), assumptions)
    hours = over_step(verdict, lambda step: run.seconds(step) / 3600)
    billed = over_step(verdict, lambda step: run.spot_seconds(step) / 3600)
    mid = verdict.step.mid_seconds
    preemptions = billed.mid * assumptions.preemptions_per_hour if math.isfinite(billed.mid) else math.inf
    waiting = assumptions.preemptions_per_hour * assumptions.wait_seconds / 3600
    lines = math.ceil(job.steps / job.log_every)
    metrics_bytes = lines * assumptions.metrics_bytes_per_line
    possible = math.isfinite(billed.high)
    return Bill(
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


def saves_of(verdict: Verdict, assumptions: Assumptions = ASSUMPTIONS, *, best: bool = False) -> Saves:
    """Return the saves of the job, or with `best` those with the interval that `auto` would choose."""
    question, memory = verdict.question, verdict.memory
    job, devices = question.job, question.devices
    assert job.steps is not None, "a question's job is concrete"
    per_device: float = memory.weights_bytes + memory.optimizer_bytes
    copies = question.mesh_shape().data
    state = Bytes(int(per_device) * devices // copies)
    if verdict.saved_bytes is not None:
        state, per_device = Bytes(verdict.saved_bytes), verdict.saved_bytes * copies / devices
    copy_seconds = per_device / machine_of(question.slice.chip).host_bytes_per_second
    pause = Seconds(assumptions.save_pause_seconds + copy_seconds)
    write = Seconds(state / question.hosts / assumptions.bucket_bytes_per_second)
    every = job.checkpoint.every
    if best or every == "auto":
        assert verdict.step is not None
        chosen = Run(job.steps, Saves(1, job.steps, state, pause, write), assumptions)
        every = aligned(job, chosen.best_every(verdict.step.mid_seconds))
    count = math.ceil(job.steps / every)  # the last step is saved, too
    return Saves(every, count, state, pause, write)


def _waste(seconds: float, best_seconds: float) -> float:
    return max(0.0, seconds / best_seconds - 1) if math.isfinite(best_seconds) else 0.0


@dataclass(frozen=True)
class Run:
    """The seconds of a whole run as functions of the seconds of a step."""

    steps: int
    saves: Saves
    assumptions: Assumptions = ASSUMPTIONS

    def work_seconds(self, step: float) -> float:
        """Steps and saves, to the end of the last write."""
        waits = (self.saves.count - 1) * self.saves.wait_seconds(self.saves.every * step)
        return self.steps * step + self.saves.count * self.saves.pause_seconds + waits + self.saves.write_seconds

    def seconds(self, step: float) -> float:
        """Undisturbed, start and compile included."""
        return self._begin_seconds + self.work_seconds(step)

    def spot_seconds(self, step: float) -> float:
        """Billed, as expected with preemptions; infinite if it would hardly ever come from one save to the next."""
        between = 3600 / self.assumptions.preemptions_per_hour
        work = self.work_seconds(step)
        interval = self.saves.every * step
        segment = min(work, interval + self.saves.stall_seconds(interval))
        restart = self._begin_seconds + self.saves.write_seconds  # reading takes as long as writing
        if (segment + restart) / between > HOPELESS:
            return math.inf
        expected = between * math.exp(restart / between) * math.expm1(segment / between) * work / segment
        return self._begin_seconds + expected

    def best_every(self, step: float) -> int:
        """Return the steps between saves that lose least time."""
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


def over_step(verdict: Verdict, of: Callable[[float], float]) -> Range:
    step = verdict.step
    assert step is not None
    return Range(of(step.low_seconds), of(step.mid_seconds), of(step.high_seconds))


def offer(verdict: Verdict, tariff: Tariff, billed_hours: Range, *, spot: bool) -> Offer | None:
    slice_ = verdict.question.slice
    price = cheapest(slice_.chip.name, tariff.zone, spot, slice_.hosts, tariff.prices_file)
    if price is None:
        return None
    rate = price.usd_per_chip_hour_spot if spot else price.usd_per_chip_hour_on_demand
    assert rate is not None, "asked for spot, the table gives rows that have it"
    return Offer(price, rate, billed_hours.times(rate * slice_.chips))
