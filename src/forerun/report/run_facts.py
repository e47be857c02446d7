"""The results of a run: status, losses, time, throughput and cost. Computed from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.hardware.chips import chip_named
from forerun.hardware.prices import Price, cheapest
from forerun.report.run_files import Row
from forerun.report.run_record import RunRecord
from forerun.report.run_status import RunStatus, status_of
from forerun.run_folder.stage_folder import run_of
from forerun.storage.address import Address
from forerun.track.goodput import goodput_of

HOUR_SECONDS = 3600


@dataclass(frozen=True)
class StepCost:
    """The time of a step and the cost of all steps, predicted and measured. None means that it is not known.

    Attributes:
      predicted_seconds: the predicted time of a step.
      measured_seconds: the measured median time of a step.
      steps: the number of steps that the costs are for.
      chips: the number of chips.
      price: the list price that is used.
      reason: why no cost is known, or "".
    """

    predicted_seconds: float | None
    measured_seconds: float | None
    steps: int
    chips: float | None = None
    price: Price | None = None
    reason: str = ""

    def usd(self, seconds: float | None) -> float | None:
        """Return the on-demand cost of `seconds` on all chips."""
        if seconds is None or self.price is None or self.chips is None:
            return None
        return seconds / HOUR_SECONDS * self.chips * self.price.usd_per_chip_hour_on_demand

    def all_steps_usd(self, step_seconds: float | None) -> float | None:
        """Return the cost of all steps with this time of a step."""
        return None if step_seconds is None else self.usd(step_seconds * self.steps)


@dataclass(frozen=True)
class RunFacts:
    """The results of a run. None means that a value is not recorded.

    Attributes:
      status: whether the run is finished, running, stopped or the like.
      step: the last recorded step.
      steps: the number of steps of the job.
      first_loss: the first recorded loss.
      final_loss: the last recorded loss.
      best_validation: (step, loss) of the lowest validation loss.
      wall_seconds: the time from the start of the first process to the last record.
      seconds: the wall time by category, if the run recorded it. The values add up to `wall_seconds`.
      tokens_per_second: the throughput of the last process.
      mfu: the model FLOPs utilization.
      memory_peak_bytes: the peak memory of a device.
      restarts: (step, seconds since the start) of each resume.
      cost: predicted and measured times and costs.
      data_reads: counts of the reads of data in a bucket by the last process of the first host; empty without a bucket.
    """

    status: RunStatus
    step: int
    steps: int | None
    first_loss: float | None
    final_loss: float | None
    best_validation: tuple[int, float] | None
    wall_seconds: float | None
    seconds: Mapping[str, float] | None
    tokens_per_second: float | None
    mfu: float | None
    memory_peak_bytes: int | None
    restarts: Sequence[tuple[int, float]]
    cost: StepCost
    data_reads: Mapping[str, int] = field(default_factory=dict)

    @property
    def useful_share(self) -> float | None:
        """The share of the wall time in useful steps (goodput)."""
        if not self.seconds or not self.wall_seconds:
            return None
        return self.seconds.get("useful", 0.0) / self.wall_seconds


def run_facts(record: RunRecord, now: float | None = None) -> RunFacts:
    """Return the results of a run. `now` is the time for the status; default: the clock."""
    losses, validation = record.points("loss"), record.points("validation_loss")
    wall_seconds, seconds = _wall_time(record)
    return RunFacts(
        status=status_of(record, _folder(record), now),
        step=record.step,
        steps=record.job.steps,
        first_loss=losses[0][1] if losses else None,
        final_loss=record.newest("loss"),
        best_validation=min(validation, key=lambda point: point[1]) if validation else None,
        wall_seconds=wall_seconds,
        seconds=seconds,
        tokens_per_second=_latest(record, "tokens_per_second"),
        mfu=_latest(record, "mfu"),
        memory_peak_bytes=_peak(record),
        restarts=_restarts(record),
        cost=_cost(record),
        data_reads=_data_reads(record),
    )


def _folder(record: RunRecord) -> Path | None:
    """Return the folder of a run, or None for a run in a bucket."""
    return None if Address.of(record.location).is_remote else run_of(record.location)


def start_seconds(record: RunRecord) -> float | None:
    """Return the time of the first record of a run, in Unix seconds."""
    times = [
        row["unix_seconds"] for row in (*record.events[:1], *record.metrics[:1]) if _is_number(row, "unix_seconds")
    ]
    return min(times) if times else None


def _wall_time(record: RunRecord) -> tuple[float | None, Mapping[str, float] | None]:
    """Return the wall time and its categories: from the events, else the summary. The metrics have no categories."""
    if (found := goodput_of(record.events)) is not None:
        return found.wall_seconds, {name: value for name, value in found.seconds.items() if value}
    goodput = record.summary.get("goodput") if record.is_finished else None
    if isinstance(goodput, dict) and isinstance(goodput.get("seconds"), dict):
        seconds = {str(name): float(value) for name, value in goodput["seconds"].items() if value}
        return float(goodput.get("wall_seconds") or sum(seconds.values())), seconds
    start = start_seconds(record)
    ends = [
        row["unix_seconds"] for row in (*record.metrics[-1:], *record.events[-1:]) if _is_number(row, "unix_seconds")
    ]
    wall = max(ends) - start if ends and start is not None else None
    if wall:
        return wall, None
    trained = record.summary.get("train_seconds")
    return (float(trained) if isinstance(trained, int | float) else None), None


def _latest(record: RunRecord, key: str) -> float | None:
    value = record.summary.get(key) if record.is_finished else None
    return record.newest(key) if value is None else float(value)


def _data_reads(record: RunRecord) -> dict[str, int]:
    names = ("requests", "read_bytes", "cache_hits", "cache_misses", "damaged_blocks", "failed_requests")
    found = {name: _latest(record, f"data_{name}") for name in names}
    return {name: int(value) for name, value in found.items() if value is not None}


def _peak(record: RunRecord) -> int | None:
    values = [value for _, value in record.points("hbm_peak_bytes")]
    summary = record.summary.get("hbm_peak_bytes")
    return int(max([*values, *([summary] if summary else [])])) if values or summary else None


def _restarts(record: RunRecord) -> list[tuple[int, float]]:
    """Return the step and the time of each resume, from the events."""
    start = start_seconds(record)
    return [
        (int(row["step"]), row["unix_seconds"] - start)
        for row in record.events
        if start is not None
        and row.get("event") == "resume"
        and _is_number(row, "step")
        and _is_number(row, "unix_seconds")
        and (row["step"] > 0 or row.get("session") != 1)
    ]


def _cost(record: RunRecord) -> StepCost:
    summary, device = record.summary, record.summary.get("device") or {}
    predicted, measured = summary.get("predicted_step_seconds"), summary.get("step_seconds")
    if measured is None:
        times = sorted(value for _, value in record.points("step_seconds"))
        measured = times[len(times) // 2] if times else None
    steps = record.job.steps or record.step
    bare = StepCost(predicted, measured, steps)
    if not summary:
        return _with_reason(bare, "the run has not ended")
    name, count = device.get("chip"), device.get("count")
    if not name or not count:
        kind = device.get("platform") or "this device"
        return _with_reason(bare, f"not known for {'CPU' if kind == 'cpu' else kind}")
    try:
        chip, price = chip_named(str(name)), cheapest(str(name))
    except UserError:
        return _with_reason(bare, f"not known for {name}")
    if price is None:
        return _with_reason(bare, f"no list price of {name} is known")
    return StepCost(predicted, measured, steps, int(count) / chip.devices_per_chip, price)


def _with_reason(cost: StepCost, reason: str) -> StepCost:
    return StepCost(cost.predicted_seconds, cost.measured_seconds, cost.steps, reason=reason)


def _is_number(row: Row, key: str) -> bool:
    value: Any = row.get(key)
    return isinstance(value, int | float) and not isinstance(value, bool)
