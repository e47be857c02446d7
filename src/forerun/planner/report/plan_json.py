"""The results of a plan as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import Impossible
from forerun.planner.cost.failures import failures_of
from forerun.planner.cost.job_cost import JobCost, Offer, Tariff, job_cost_of
from forerun.planner.report.formatting import limit_text
from forerun.planner.report.plan_notes import provider_of

Changes = Mapping[str, Sequence[str]]  # by slice: overrides that the job needed to run on it


def as_json(
    verdicts: Sequence[FitResult],
    tariff: Tariff | None = None,
    changes: Changes | None = None,
    impossible: Sequence[Impossible] = (),
) -> dict[str, Any]:
    """Return the results as a JSON object. Its keys are stable, because programs read them.

    Bytes are of one device. Dollars and hours are of the complete job.
    """
    rows = [_slice_json(v, tariff or Tariff(), (changes or {}).get(v.slice_name, ())) for v in verdicts]
    return {"slices": [*rows, *(_impossible_json(one, rows[0]) for one in impossible)]}


def _impossible_json(one: Impossible, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the same keys as the others, in which only the slice, `fits` and `error` have values."""
    error = {"code": one.error.code, "what": one.what, "why": one.error.why, "fix": one.error.fix}
    place = one.slice
    known = {"slice": place.name, "platform": place.platform, "chips": place.chips, "devices": place.devices}
    return {**dict.fromkeys(like), **known, "fits": False, "changes": [], "error": error}


def _slice_json(v: FitResult, tariff: Tariff, changes: Sequence[str]) -> dict[str, Any]:
    return {
        "slice": v.slice_name,
        "platform": v.question.slice.platform,
        "fits": v.fits,
        "hbm_peak_bytes": int(v.memory.peak_bytes),
        "hbm_limit_bytes": int(v.limit_bytes),
        "compile_seconds": round(float(v.compile_seconds), 3),
        "chips": v.question.slice.chips,
        "devices": v.question.slice.devices,
        "devices_used": v.question.devices,
        "mesh": v.mesh,
        "program": v.program,
        "attention": None if v.attention is None else asdict(v.attention),
        "unroll": None if v.unroll is None else asdict(v.unroll),
        "hbm_weights_bytes": int(v.memory.weights_bytes),
        "hbm_optimizer_bytes": int(v.memory.optimizer_bytes),
        "hbm_batch_bytes": int(v.memory.batch_bytes),
        "hbm_working_bytes": int(v.memory.working_bytes),
        "host_bytes": int(v.memory.host_bytes),
        "hbm_ledger": {
            **{_key(name): int(size) for name, size in v.ledger.items()},
            "host_offloaded": int(v.memory.host_bytes),
        },
        **_time_json(v),
        **_money_json(job_cost_of(v, tariff), tariff),
        "failures": _failures_json(v),
        "changes": [one for change in changes for one in change.split()],
        "error": None,
    }


def _key(words: str) -> str:
    return words.replace(" ", "_").replace("-", "_")


def _time_json(v: FitResult) -> dict[str, Any]:
    step = v.step
    seconds = {"low": step.low_seconds, "mid": step.mid_seconds, "high": step.high_seconds} if step else None
    return {
        "step_seconds": seconds,
        "time_breakdown": {_key(part): seconds for part, seconds in step.parts_seconds.items()} if step else None,
        "tokens_per_second": v.tokens_per_second,
        "mfu": v.mfu,
        "limit": limit_text(v) if step else None,
        "floor_seconds": step.floor_seconds if step else None,
        "uncertain": list(step.doubts) if step else [],
        "range_causes": [asdict(reason) for reason in step.range_reasons] if step else [],
    }


def _money_json(bill: JobCost | None, tariff: Tariff) -> dict[str, Any]:
    on_demand, spot = (bill.on_demand, bill.spot) if bill else (None, None)
    return {
        "hours": bill.hours.mid if bill else None,
        "hours_range": bill.hours.as_dict() if bill else None,
        "cost_usd": {"on_demand": _usd(on_demand), "spot": _usd(spot)},
        "zone": {"on_demand": _zone(on_demand), "spot": _zone(spot)},
        "provider": {"on_demand": provider_of(on_demand), "spot": provider_of(spot)},
        "within_max_usd": None if tariff.max_usd is None else bool(bill and bill.within(tariff.max_usd)),
        "spot": {
            "hours": bill.spot_hours.mid,
            "preemptions": bill.preemptions,
            "overhead": bill.spot_overhead,
            "checkpoint_every": bill.best_every,
        }
        if bill and bill.spot_hours
        else None,
        "checkpoint_every": bill.saves.every if bill else None,
        "checkpoint_waste": _finite(bill.save_waste) if bill else None,
        "checkpoint_bytes": int(bill.saves.state_bytes) if bill else None,
        "written_bytes": int(bill.written_bytes) if bill else None,
        "kept_bytes": int(bill.kept_bytes) if bill else None,
    }


def _failures_json(v: FitResult) -> dict[str, Any] | None:
    found = failures_of(v)
    return None if found is None else asdict(found)


def _finite(share: float) -> float | None:
    return round(share, 4) if math.isfinite(share) else None


def _usd(offer: Offer | None) -> float | None:
    return round(offer.usd.mid, 4) if offer else None


def _zone(offer: Offer | None) -> str | None:
    return offer.price.zone if offer else None
