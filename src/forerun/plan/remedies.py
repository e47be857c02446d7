"""What to change when a job does not fit, each change proven by compiling it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.config.schema import Job, Mesh, Remat
from forerun.plan.question import Question
from forerun.plan.verdict import Verdict
from forerun.units import Bytes

MOST = 4
OFFLOAD = Remat(policy="named", offload=("layer_in",))


@dataclass(frozen=True)
class Remedy:
    """A changed job, and the change as it is written on the command line."""

    overrides: str
    job: Job


@dataclass(frozen=True)
class Tried:
    remedy: Remedy
    verdict: Verdict

    def told(self, quickest_seconds: float | None) -> str:
        """`remat=full: fits, 1.92 GiB to spare, +14 % time` against the quickest that fits."""
        v = self.verdict
        if not v.fits:
            return f"{self.remedy.overrides}: still {Bytes(-v.spare_bytes)} short"
        text = f"{self.remedy.overrides}: fits, {v.spare_bytes} to spare"
        if v.step is None or quickest_seconds is None or v.step.mid_seconds == quickest_seconds:
            return text
        return f"{text}, {100 * (v.step.mid_seconds / quickest_seconds - 1):+.0f} % time"


def remedies(v: Verdict) -> list[Remedy]:
    """Changes that keep the effective batch and the result, mildest first; only what has a chance by its size."""
    return list(_candidates(v))[:MOST]


def verified(v: Verdict, ask: Callable[[Sequence[Question]], list[Verdict]]) -> list[Tried]:
    """Every remedy compiled, those that fit first, the quickest of them at the top."""
    tried = remedies(v)
    verdicts = ask([Question(remedy.job, v.question.slice) for remedy in tried])
    both = [Tried(remedy, verdict) for remedy, verdict in zip(tried, verdicts, strict=True)]
    return sorted(both, key=lambda t: (not t.verdict.fits, t.verdict.step.mid_seconds if t.verdict.step else 0.0))


def _candidates(v: Verdict) -> Iterator[Remedy]:
    job, mesh = v.question.job, v.question.mesh_shape()
    resting = v.memory.weights_bytes + v.memory.optimizer_bytes
    if mesh.fsdp == 1 and mesh.data > 1:
        split = Mesh(data=1, fsdp=-1, tp=job.mesh.tp)
        yield Remedy("mesh.data=1 mesh.fsdp=-1", _changed(job, mesh=split))
        resting //= mesh.data
    if resting >= v.limit_bytes:
        return
    smaller = _smaller_micro_batch(v, resting)
    for words, remat in _less_kept(job.remat):
        yield Remedy(words, _changed(job, remat=remat))
    if smaller:
        yield Remedy(f"micro_batch={smaller}", _changed(job, micro_batch=smaller))
        for words, remat in _less_kept(job.remat):
            yield Remedy(f"micro_batch={smaller} {words}", _changed(job, micro_batch=smaller, remat=remat))


def _less_kept(remat: Remat) -> Iterator[tuple[str, Remat]]:
    if remat.policy in ("none", "dots"):
        yield "remat=full", Remat(policy="full")
    if remat != OFFLOAD:
        yield "'remat={policy: named, offload: [layer_in]}'", OFFLOAD


def _smaller_micro_batch(v: Verdict, resting_bytes: int) -> int | None:
    """The largest that should fit if activations shrink with it; the effective batch stays, by accumulation."""
    share = v.question.job.batch // v.question.mesh_shape().data_parallel
    micro = v.question.job.micro_batch or share
    divisors = [n for n in range(micro - 1, 0, -1) if share % n == 0]
    room = v.limit_bytes - resting_bytes - v.memory.weights_bytes  # accumulated gradients are as large as the weights
    return next((n for n in divisors if v.memory.working_bytes * n / micro <= room), divisors[-1] if divisors else None)


def _changed(job: Job, **changes: Any) -> Job:
    return job.model_copy(update=changes)
