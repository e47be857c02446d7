"""Suggested changes for a job that does not fit. Each change is compiled before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forerun.config.schema import Job, Remat
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import Bytes

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
