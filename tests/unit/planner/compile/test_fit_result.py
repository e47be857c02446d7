"""`unroll: auto` takes the program without a loop if it fits with a margin and has the shorter predicted step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fit_results import fit_result, request

from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler, result_cache
from forerun.planner.compile.fit_result import MARGIN, MOST_LAYERS, MOST_WIDTH, FitResult, decided
from forerun.planner.compile.request import CompileRequest
from forerun.planner.hlo import Module
from forerun.planner.report.plan_json import as_json
from forerun.planner.report.plan_notes import unroll_notes
from forerun.units import GIB

LOOP, STRAIGHT = Module({}, "loop"), Module({}, "straight")
SMALL = {"layers": 4, "embed": 64, "heads": 2, "vocab": 256}


def question(model: object = SMALL, **values: object) -> CompileRequest:
    return request(**{"model": model, "batch": 8, "unroll": "auto", **values})


def result(asked: CompileRequest, peak_gib: float, seconds: float | None) -> FitResult:
    module = None if seconds is None else STRAIGHT if asked.job.unroll else LOOP
    program = "straight" if asked.job.unroll else "loop"
    return fit_result(asked, seconds, (peak_gib, 1, 2, 0.5), program=program, module=module)


class Compiler:
    """Returns fixed figures (peak in GiB, seconds) for the program with a loop and the one without."""

    def __init__(self, loop: tuple[float, float | None], straight: tuple[float, float | None]) -> None:
        self.figures = {False: loop, True: straight}
        self.compiled: list[bool] = []

    def __call__(self, asked: CompileRequest) -> FitResult:
        unroll = asked.job.unroll
        assert isinstance(unroll, bool)
        self.compiled.append(unroll)
        return result(asked, *self.figures[unroll])


LIMIT = slice_named("v5e-8").chip.usable_bytes / GIB


@pytest.mark.parametrize(
    ("loop", "straight", "unrolled"),
    [
        ((8, 1.0), (9, 0.8), True),
        ((8, 1.0), (9, 0.99), False),  # less than 2 % shorter
        ((8, 1.0), (LIMIT * (1 - MARGIN) + 0.1, 0.8), False),  # fits, but without the margin
        ((8, 1.0), (20, None), False),
        ((20, None), (9, 0.8), True),
        ((20, None), (21, None), False),
    ],
)
def test_choice(loop: tuple[float, float | None], straight: tuple[float, float | None], unrolled: bool) -> None:
    asked = question()
    found = decided(asked, Compiler(loop, straight))
    assert found.unroll is not None
    assert (found.unroll.unrolled, found.program) == (unrolled, "straight" if unrolled else "loop")
    assert found.question == asked, "a search writes the job with its own value"
    assert found.compile_seconds == 2
    assert found.module is ((STRAIGHT if unrolled else LOOP) if found.fits else None)


@pytest.mark.parametrize("key", ["layers", "embed"])
def test_a_large_model_is_compiled_once(key: str) -> None:
    at = {"layers": MOST_LAYERS, "embed": MOST_WIDTH}[key]
    for size, count in ((at, 2), (2 * at, 1)):
        compiled = Compiler((8, 1.0), (9, 0.5))
        found = decided(question(SMALL | {key: size}), compiled)
        assert found.unroll is not None
        assert (found.unroll.unrolled, len(compiled.compiled)) == (count == 2, count)
        assert (str(size) in found.unroll.reason) == (count == 1)


def test_a_custom_model_keeps_its_own_layers() -> None:
    found = decided(question({"name": "mine:Model", "vocab": 256}), Compiler((8, 1.0), (9, 0.5)))
    assert found.unroll is not None
    assert not found.unroll.unrolled


def test_plan_and_a_later_run_share_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision and both programs are stored, so `train` finds what `plan` compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled, asked = Compiler((8, 1.0), (9, 0.8)), question()
    monkeypatch.setattr(result_cache, "verdict", lambda one, stop, on_phase: compiled(one))
    first = result_cache.cached_fit_result(asked)
    assert result_cache.cached_fit_result(asked) == first == result_cache.recall(asked)
    fixed = replace(asked, resolved=asked.resolved.with_values(unroll=True))
    assert result_cache.cached_fit_result(fixed).program == first.program == "straight"
    assert compiled.compiled == [False, True]


def test_the_report_has_the_choice_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decided(question(), Compiler((8, 1.0), (9, 0.8)))
    [note] = unroll_notes([found, result(question(unroll=True), 8, 1.0)])
    assert "v5e-8: true" in note
    assert "0.8 s without" in note
    [row] = as_json([found])["slices"]
    assert row["unroll"] == {"unrolled": True, "reason": found.unroll.reason if found.unroll else ""}


def test_verdict_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """All callers of `verdict` get a decided program: the compiler never sees `auto`."""
    seen = []

    def ask(asked: CompileRequest, *_: object) -> object:
        seen.append(asked.job.unroll)
        raise RuntimeError("stop here")

    monkeypatch.setattr("forerun.planner.compile.compiler.ask", ask)
    with pytest.raises(RuntimeError, match="stop here"):
        compiler.verdict(question())
    assert seen == [False]
