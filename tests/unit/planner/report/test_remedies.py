"""What is proposed when a job does not fit keeps the effective batch, and only what compiled is called fitting."""

from __future__ import annotations

from collections.abc import Sequence

from fit_results import fit_result, request

from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.planner.report.remedies import OFFLOAD, remedies, verified
from forerun.units import GIB


def verdict_of(
    question: CompileRequest, peak_gib: float, weights_gib: float = 1, seconds: float | None = None
) -> FitResult:
    fits = peak_gib * GIB <= question.slice.chip.usable_bytes
    return fit_result(question, seconds, (peak_gib, weights_gib, 2 * weights_gib), fits=fits)


def question(**job: object) -> CompileRequest:
    return request(**{"batch": 256, **job})


def test_the_effective_batch_is_kept() -> None:
    asked = question(remat="none")
    proposed = remedies(verdict_of(asked, 96))
    assert [one.overrides for one in proposed][:2] == ["remat=full", "'remat={policy: named, offload: [layer_in]}'"]
    for one in proposed:
        assert one.job.batch == 256
        changed = CompileRequest(one.resolved, asked.slice).derived()
        assert changed.micro_batch * changed.accumulation * changed.mesh.data_parallel == 256
    smaller = next(one.job.micro_batch for one in proposed if one.overrides.startswith("micro_batch"))
    assert smaller == 4  # 93 GiB of activations for 32 rows, 11.75 GiB of room: 4 of the divisors 1, 2, 4, 8, 16


def test_nothing_is_proposed_that_cannot_help() -> None:
    assert remedies(verdict_of(question(), 60, weights_gib=20)) == []
    only = question(micro_batch=1, remat={"policy": "named", "offload": ["layer_in"]})
    assert only.job.remat == OFFLOAD
    assert remedies(verdict_of(only, 20)) == []


def test_copies_of_the_model_are_split_first() -> None:
    proposed = remedies(verdict_of(question(mesh={"data": 8, "fsdp": 1}), 60, weights_gib=20))
    assert proposed[0].overrides == "mesh.data=1 mesh.fsdp=-1"


def test_what_fits_comes_first_and_the_quickest_of_it() -> None:
    asked = question(remat="none")

    def ask(questions: Sequence[CompileRequest]) -> list[FitResult]:
        figures = [(16.0, None), (10.0, 1.5), (9.0, 1.2), (5.0, 1.4)]
        return [verdict_of(q, peak, seconds=seconds) for q, (peak, seconds) in zip(questions, figures, strict=True)]

    told = [one.told(quickest_seconds=1.2) for one in verified(verdict_of(asked, 96), ask)]
    assert told == [
        "micro_batch=4: fits, 6.75 GiB to spare",
        "micro_batch=4 remat=full: fits, 10.75 GiB to spare, +17 % time",
        "'remat={policy: named, offload: [layer_in]}': fits, 5.75 GiB to spare, +25 % time",
        "remat=full: still 256 MiB short",
    ]


def test_a_change_that_needs_more_memory_is_left_out() -> None:
    asked = question(remat="none")

    def ask(questions: Sequence[CompileRequest]) -> list[FitResult]:
        peaks = [17.0, 18.0, 18.5, 10.0]  # the second one needs as much as the job
        return [verdict_of(q, peak, seconds=1.0) for q, peak in zip(questions, peaks, strict=True)]

    told = [one.told(quickest_seconds=1.0) for one in verified(verdict_of(asked, 18), ask)]
    assert told == ["micro_batch=16 remat=full: fits, 5.75 GiB to spare", "remat=full: still 1.25 GiB short"]
