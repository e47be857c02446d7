"""Suggested changes for a job that does not fit. Each change is compiled before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forerun.config.schema import Job, Remat
from forerun.errors import UserError
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.planner.cost.job_cost import Tariff, job_cost_of
from forerun.planner.report.formatting import gib_text, places_text
from forerun.planner.report.plan_notes import place_text
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import Bytes, Usd

MOST = 4  # changes that are compiled
OFFLOAD = Remat(policy="named", offload=("layer_in",))


@dataclass(frozen=True)
class Remedy:
    """A changed job, and the change as command-line overrides."""

    overrides: str
    resolved: ResolvedJob

    @property
    def job(self) -> Job:
        """The changed job."""
        return self.resolved.job


@dataclass(frozen=True)
class Tried:
    """A change and the result of compiling it."""

    remedy: Remedy
    verdict: FitResult

    def told(self, quickest_seconds: float | None) -> str:
        """Return a line such as `remat=full: fits, 1.92 GiB to spare, +14 % time`.

        The time is relative to `quickest_seconds`, the step time of the fastest change that fits.
        """
        v = self.verdict
        if not v.fits:
            return f"{self.remedy.overrides}: still {Bytes(-v.spare_bytes)} short"
        text = f"{self.remedy.overrides}: fits, {v.spare_bytes} to spare"
        if v.step is None or quickest_seconds is None or v.step.mid_seconds == quickest_seconds:
            return text
        return f"{text}, {100 * (v.step.mid_seconds / quickest_seconds - 1):+.0f} % time"


def remedies(v: FitResult) -> list[Remedy]:
    """Return changes that may make the job fit, mildest first. They keep the effective batch and the training result.

    Changes that cannot fit because of the size of the weights and the optimizer are omitted.
    """
    return list(_candidates(v))[:MOST]


def verified(v: FitResult, ask: Callable[[Sequence[CompileRequest]], list[FitResult]]) -> list[Tried]:
    """Compile every change with `ask` and return the results: those that fit first, fastest first.

    Changes that need as much memory as the job are omitted.
    """
    tried = remedies(v)
    verdicts = ask([CompileRequest(remedy.resolved, v.question.slice) for remedy in tried])
    both = [
        Tried(remedy, verdict)
        for remedy, verdict in zip(tried, verdicts, strict=True)
        if verdict.fits or verdict.spare_bytes > v.spare_bytes
    ]
    return sorted(both, key=lambda t: (not t.verdict.fits, t.verdict.step.mid_seconds if t.verdict.step else 0.0))


def _candidates(v: FitResult) -> Iterator[Remedy]:
    """Yield changes, mildest first: sharding the state, less saved activations, a smaller micro-batch, or both."""
    resolved, job, mesh = v.question.resolved, v.question.job, v.question.mesh_shape()
    resting = v.memory.weights_bytes + v.memory.optimizer_bytes
    if mesh.fsdp == 1 and mesh.data > 1:
        split = job.mesh.model_copy(update={"data": 1, "fsdp": -1})
        yield Remedy("mesh.data=1 mesh.fsdp=-1", resolved.with_values(mesh=split))
        resting //= mesh.data
    if resting >= v.limit_bytes:
        return  # the changes below only reduce activations
    smaller = _smaller_micro_batch(v, resting)
    for words, remat in _smaller_remats(job.remat):
        yield Remedy(words, resolved.with_values(remat=remat))
    if smaller:
        yield Remedy(f"micro_batch={smaller}", resolved.with_values(micro_batch=smaller))
        for words, remat in _smaller_remats(job.remat):
            yield Remedy(f"micro_batch={smaller} {words}", resolved.with_values(micro_batch=smaller, remat=remat))


def _smaller_remats(remat: Remat) -> Iterator[tuple[str, Remat]]:
    """Yield (overrides, policy) of remat policies that keep fewer activations in device memory."""
    if remat.policy in ("none", "dots"):
        yield "remat=full", Remat(policy="full")
    if remat != OFFLOAD:
        yield "'remat={policy: named, offload: [layer_in]}'", OFFLOAD


def _smaller_micro_batch(v: FitResult, resting_bytes: int) -> int | None:
    """Return the largest micro-batch that should fit if activations shrink with it, or None if none is smaller.

    Accumulation keeps the effective batch. If no size should fit, the smallest one is returned.
    """
    share = v.question.job.batch // v.question.mesh_shape().data_parallel
    micro = v.question.job.micro_batch or share
    divisors = [n for n in range(micro - 1, 0, -1) if share % n == 0]
    room = v.limit_bytes - resting_bytes - v.memory.weights_bytes  # accumulated gradients are as large as the weights
    return next((n for n in divisors if v.memory.working_bytes * n / micro <= room), divisors[-1] if divisors else None)


def over_budget(verdicts: Sequence[FitResult], tariff: Tariff) -> UserError | None:
    """Return an error if the job fits some slices but all of them exceed the budget, else None."""
    assert tariff.max_usd is not None
    bills = [(v, bill) for v in verdicts if (bill := job_cost_of(v, tariff))]
    if not bills or any(bill.within(tariff.max_usd) for _, bill in bills):
        return None
    offers = [
        (offer.usd.mid, v.slice_name, way, place_text(offer))
        for v, bill in bills
        for way, offer in (("on demand", bill.on_demand), ("spot", bill.spot))
        if offer
    ]
    holding = [v.question.slice for v, _ in bills]
    kinds = places_text(holding, one=True)
    limit = f"${tariff.max_usd:g}"  # the user's figure, not a prediction
    if not offers:
        return UserError(
            "E-PLAN-015",
            f"no {kinds} is known to stay below {limit}",
            why=f"no price is known for the {places_text(holding)} that hold the job",
            fix="give your own prices: --prices FILE (columns: forerun hardware prices)",
        )
    usd, name, way, zone = min(offers)
    return UserError(
        "E-PLAN-016",
        f"no {kinds} that holds the job stays below {limit}",
        why=f"the cheapest is {name} {way} in {zone} for {Usd(usd)}",
        fix=f"allow --max-usd {max(1, round(usd * 1.05 + 0.5))}, or train for fewer steps",
    )


def nearest(verdicts: Sequence[FitResult]) -> FitResult:
    """Return the result of the slice that lacks the smallest share of its memory."""
    return max(verdicts, key=lambda v: v.spare_bytes / v.limit_bytes)


def does_not_fit(verdicts: Sequence[FitResult], tried: Sequence[Tried] = ()) -> UserError:
    """Return the error for a job that fits none of the slices.

    Args:
        verdicts: The results of all slices.
        tried: Changes that were compiled for the nearest slice, as suggestions.
    """
    near = nearest(verdicts)
    places = places_text(v.question.slice for v in verdicts)
    larger = "a machine with more GPUs" if near.question.slice.platform == "gpu" else "a slice with more chips"
    name, memory = near.slice_name, near.memory
    resting = Bytes(memory.weights_bytes + memory.optimizer_bytes)
    why = f"{name} needs {gib_text(memory.peak_bytes)} GiB per device and has {gib_text(near.limit_bytes)} GiB: "
    why += f"{Bytes(-near.spare_bytes)} short"
    if resting > near.limit_bytes:
        why += f"; weights and optimizer alone are {resting}"
    return UserError(
        "E-PLAN-017",
        f"the job does not fit {name}"
        if len(verdicts) == 1
        else f"the job fits none of these {len(verdicts)} {places}",
        why=why,
        fix="\n".join([*_remedy_lines(tried, name), f"{larger} or memory: forerun hardware slices"]),
    )


def _remedy_lines(tried: Sequence[Tried], name: str) -> list[str]:
    """Return the lines of the fix that list the compiled changes."""
    if not tried:
        return []
    quickest = next((one.verdict.step.mid_seconds for one in tried if one.verdict.step), None)
    lines = [f"- {one.told(quickest)}" for one in tried]
    return [f"one of these, each compiled for {name} with the batch unchanged:", *lines, "or"]
