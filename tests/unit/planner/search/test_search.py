"""The search against a compiler made of formulas: it ends, finds the best, survives failures and Ctrl-C."""

from __future__ import annotations

import io
import itertools
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from error_assertions import raises_error
from fit_results import fit_result
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.slices import Slice, slice_named
from forerun.planner.compile import result_cache
from forerun.planner.compile.compiler import CompilerFailure
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.planner.cost.job_cost import Tariff
from forerun.planner.search import search
from forerun.planner.search.ranking import equal_slices, ranked
from forerun.planner.search.search import Scoreboard
from forerun.planner.search.space import Bounds, Candidate, Space, space_of
from forerun.planner.search.strategy import GOALS, LOOK_AHEAD, Outcome, Strategy, TimeAndCost
from forerun.planner.time.step_time import StepTime
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB

Compiler = Callable[..., FitResult]


def job(**values: object) -> ResolvedJob:
    given = {"model": "llama3.2-1b", "data": "/text", "batch": 16, "steps": 1000, "name": "j", **values}
    return ResolvedJob(Job.model_validate(given))


def bounds() -> Bounds:
    return Bounds(lambda one: 2.0 * one.chips)


def strategy_of(space: Space, goal: str = "cheapest") -> Strategy:
    rates = {name: 2.0 * group[0].slice.chips / 3600 for name, group in space.by_slice.items()}
    return Strategy(space, goal, rates)  # type: ignore[arg-type]


def verdict_of(asked: CompileRequest, seconds: float | None, peak_bytes: int) -> FitResult:
    return fit_result(asked, seconds, (peak_bytes / GIB,), tokens_per_step=asked.job.batch * asked.job.sequence)


def formula(space: Space, truth: Callable[[Candidate], float] = lambda one: 1.0) -> Callable[[Candidate], Outcome]:
    """What the guesses say, bent by `truth`."""

    def of(one: Candidate) -> Outcome:
        peak = int(space.guessed_bytes(one) * 1.1)
        fits = peak <= (one.slice.chip.usable_bytes or 0)
        return Outcome(space.guessed_seconds(one) * truth(one) if fits else None, peak)

    return of


def run(strategy: Strategy, tell: Callable[[Candidate], Outcome]) -> dict[Candidate, Outcome]:
    known: dict[Candidate, Outcome] = {}
    while (one := strategy.next(known)) is not None:
        assert one not in known
        known[one] = tell(one)
    return known


@pytest.mark.parametrize("goal", GOALS)
def test_finds_the_best_of_a_space_with_few_questions(goal: str) -> None:
    space = space_of(job(sequence=4096), "v6e-4,v6e-8,v5e-8,v5p-8", bounds())
    strategy = strategy_of(space, goal)
    # Offload is dearer than guessed and large micro-batches are better: the guesses' order is not the truth's.
    tell = formula(space, lambda one: (1.1 if one.remat.offload else 1.0) * (1 + 0.05 / one.micro_batch))
    known = run(strategy, tell)
    assert len(known) < len(space.candidates) / 3

    def best(outcomes: dict[Candidate, Outcome]) -> float:
        scores = [strategy.standing(one, o.seconds).score(strategy.goal) for one, o in outcomes.items() if o.seconds]
        return min(scores)

    assert best(known) <= 1.05 * best({one: tell(one) for one in space.candidates})


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_ends_whatever_the_compiler_says(random) -> None:  # type: ignore[no-untyped-def]
    space = space_of(job(batch=8), "v5e-4,v6e-1", bounds())
    answers: dict[Candidate, Outcome] = {}

    def tell(one: Candidate) -> Outcome:
        kind = random.random()
        answer = Outcome(random.random(), 1) if kind < 0.5 else Outcome(None, 99 * GIB if kind < 0.9 else None)
        return answers.setdefault(one, answer)

    known = run(strategy_of(space), tell)
    assert set(known) <= set(space.candidates)
    assert strategy_of(space).next(known) is None


def test_is_a_function_of_what_is_known() -> None:
    space = space_of(job(), "v6e-4,v5e-8", bounds())
    strategy, tell = strategy_of(space), formula(space)
    known = run(strategy, tell)
    for cut in (1, len(known) // 2):
        rest = dict(itertools.islice(known.items(), cut))
        while (one := strategy.next(rest)) is not None:
            rest[one] = tell(one)
        assert rest.keys() == known.keys()


def test_what_runs_is_not_asked_again() -> None:
    space = space_of(job(), "v6e-4,v5e-8", bounds())
    strategy = strategy_of(space)
    first = strategy.next({})
    assert first is not None
    second = strategy.next({}, [first])
    assert second is not None
    assert second.slice.name != first.slice.name


def test_a_slice_that_cannot_win_is_left_alone() -> None:
    """v2 at its peak is slower than a good v6e-8 step, and at this price dearer."""
    space = space_of(job(), "v6e-8,v2-8", bounds())
    strategy = strategy_of(space)
    known = run(strategy, formula(space))
    assert {one.slice.name for one in known} == {"v6e-8"}


def test_what_did_not_fit_rules_out_what_is_larger_and_nothing_else() -> None:
    space = space_of(job(), "v6e-4", bounds())
    strategy = strategy_of(space)
    by_name = {str(one): one for one in space.candidates}
    known = {by_name["v6e-4 1x4x1 micro-batch 2, remat full"]: Outcome(None, 40 * GIB)}
    larger = {name for name, one in by_name.items() if strategy._cannot_fit(known, one)}
    remats = ("remat full", "keep attention_out", "remat dots", "remat none")
    assert larger == {f"v6e-4 1x4x1 micro-batch 2, {remat}" for remat in remats}  # 4 at once needs no gradient sum
    known = {by_name["v6e-4 1x4x1 micro-batch 1, offload layer_in"]: Outcome(None, 40 * GIB)}
    larger = {name for name, one in by_name.items() if strategy._cannot_fit(known, one)}
    assert len(larger) == 10  # both micro-batches, all remats but dots
    assert not any("micro-batch 4" in name or "1x2x2" in name for name in larger)


def test_standing() -> None:
    a, b, c, free = TimeAndCost(1, 2), TimeAndCost(2, 2), TimeAndCost(2, 1), TimeAndCost(3, None)
    assert a.beats(b)
    assert c.beats(b)
    assert not a.beats(c)
    assert not c.beats(a)
    assert not a.beats(a)
    assert a.beats(free)
    assert not free.beats(a)
    assert min((a, b, c), key=lambda one: one.score("fastest")) == a
    assert min((a, b, c), key=lambda one: one.score("cheapest")) == c


def test_ranking_marks_the_front_and_puts_limits_first() -> None:
    space = space_of(job(), "v6e-4,v6e-8", bounds())
    picks = [space.by_slice["v6e-4"][0], space.by_slice["v6e-8"][0], space.by_slice["v6e-8"][1]]
    verdicts = {
        one: verdict_of(one.question(space.resolved), seconds, GIB)
        for one, seconds in zip(picks, (20.0, 11.0, 15.0), strict=True)
    }
    found = ranked(verdicts, "cheapest", Tariff())
    assert [one.candidate for one in found] == picks
    assert [one.on_front for one in found] == [True, True, False]
    assert [one.candidate for one in ranked(verdicts, "fastest", Tariff())] == [picks[1], picks[2], picks[0]]
    limited = ranked(verdicts, "cheapest", Tariff(), max_hours=4)
    assert [one.candidate for one in limited] == [picks[1], picks[0], picks[2]]
    assert [one.within for one in limited] == [True, False, False]


def test_equal_bills_are_ranked_by_the_step() -> None:
    """Where saves take longer than the steps between them, the bill does not depend on the step."""
    space = space_of(job(checkpoint={"every": 1}), "v6e-4", bounds())
    seconds = {one: 1e-4 * (1 + n % 7) for n, one in enumerate(space.candidates[:20])}
    verdicts = {one: verdict_of(one.question(space.resolved), s, GIB) for one, s in seconds.items()}
    assert ranked(verdicts, "cheapest", Tariff())[0].step_seconds == 1e-4


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CompileRequest]:
    """A compiler of formulas in place of the real one; what it was asked."""
    asked: list[CompileRequest] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(search, "require_compilers", lambda targets: None)
    monkeypatch.chdir(tmp_path)

    def compiled(question: CompileRequest, stop: threading.Event, on_phase: object) -> FitResult:
        asked.append(question)
        micro = question.derived().micro_batch
        return verdict_of(question, 2.0 / question.slice.devices + 0.01 / micro, GIB)

    monkeypatch.setitem(search.explore.__kwdefaults__, "ask", compiled)
    return asked


def searched(**options: object) -> tuple[int, str]:
    out = io.StringIO()
    code = search.run_search(job(), **{"goal": "cheapest", "on": "v6e-4", "stream": out, **options})  # type: ignore[arg-type]
    return code, out.getvalue()


def test_the_same_question_again_compiles_nothing(compiler: list[CompileRequest]) -> None:
    code, text = searched()
    assert code == 0
    assert "out by formula" in text
    first = len(compiler)
    assert first > 3
    code, again = searched()
    assert len(compiler) == first
    assert f"0 compiled, {first} from the cache" in again
    assert text.splitlines()[-1] == again.splitlines()[-1]


def test_the_ranking_as_json(compiler: list[CompileRequest]) -> None:
    code, text = searched(as_json=True)
    answer = json.loads(text)
    assert (code, answer["goal"], answer["written"]) == (0, "cheapest", f"{job().job.name}.cheapest.yaml")
    assert answer["candidates"] == (
        sum(answer["ruled_out"].values()) + answer["compiled"] + answer["recalled"] + answer["failed"] + answer["left"]
    )
    dollars = [plan["cost_usd"]["on_demand"] for plan in answer["plans"] if plan["within_limits"]]
    assert dollars == sorted(dollars)
    assert {"slice", "mesh", "micro_batch", "remat", "step_seconds", "on_front"} <= set(answer["plans"][0])
    assert compiler


def test_an_interrupted_search_tells_and_goes_on(
    compiler: list[CompileRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search.os, "cpu_count", lambda: 1)
    searched(out_path=Path("whole.yaml"))
    whole = {result_cache.key(question) for question in compiler}
    for path in result_cache.folder().iterdir():
        path.unlink()
    compiler.clear()
    ask = search.explore.__kwdefaults__["ask"]

    def pressed(question: CompileRequest, stop: threading.Event, on_phase: object) -> FitResult:
        if len(compiler) == 3:
            raise KeyboardInterrupt
        return ask(question, stop, on_phase)  # type: ignore[no-any-return]

    monkeypatch.setitem(search.explore.__kwdefaults__, "ask", pressed)
    code, text = searched()
    assert code == 130
    assert text.startswith("interrupted after")
    assert "v6e-4" in text
    assert "interrupted" in Path("j.cheapest.yaml").read_text()
    monkeypatch.setitem(search.explore.__kwdefaults__, "ask", ask)
    assert searched()[0] == 0
    assert len(compiler) == len(whole), "something was compiled twice, or left out"
    assert {result_cache.key(question) for question in compiler} == whole


def test_a_compiler_failure_is_told_and_does_not_end_the_search(
    compiler: list[CompileRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = search.explore.__kwdefaults__["ask"]

    def broken(question: CompileRequest, stop: threading.Event, on_phase: object) -> FitResult:
        if question.job.remat.policy == "dots":
            compiler.append(question)
            raise CompilerFailure("RET_CHECK failure in some pass")
        return ask(question, stop, on_phase)  # type: ignore[no-any-return]

    monkeypatch.setitem(search.explore.__kwdefaults__, "ask", broken)
    code, text = searched()
    assert code == 0
    assert "RET_CHECK" in text
    first = len(compiler)
    assert searched()[0] == 0
    assert len(compiler) == first


def test_a_calibration_reaches_the_ranking_and_not_the_cache(compiler: list[CompileRequest]) -> None:
    def twice(answer: FitResult) -> FitResult:
        assert answer.step
        return replace(answer, step=StepTime(2 * answer.step.mid_seconds, answer.step.parts_seconds))

    searched()
    first = len(compiler)
    plain = result_cache.recall(compiler[0])
    _, text = searched(adjust=twice)
    assert plain == result_cache.recall(compiler[0])
    assert len(compiler) == first
    assert "1.00 s" in text  # 2.0 / 4 devices, and a little


def test_limits_that_nothing_keeps(compiler: list[CompileRequest]) -> None:
    with raises_error("E-PLAN-021", "--max-hours") as raised:
        searched(max_hours=0.1)
    assert "the fastest takes" in raised.value.why
    with raises_error("E-PLAN-019"):
        searched(max_hours=0.0001)
    with raises_error("E-PLAN-018"):
        searched(goal="best")


def without_the_gpu_compiler(targets: Iterable[Slice]) -> None:
    if any(one.platform == "gpu" for one in targets):
        raise UserError("E-PLAN-004", "the GPU compiler is not installed", why="", fix="install it")


def test_a_missing_compiler_is_an_error_only_if_its_machines_are_asked_for(
    compiler: list[CompileRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "require_compilers", without_the_gpu_compiler)
    code, text = searched(on="v6e-4,h100-*", goal="fastest")
    assert code == 0
    assert {question.slice.name for question in compiler} == {"v6e-4"}
    assert "the GPU compiler" in text
    for named in ("v6e-8,h100-8", "h100-*"):
        with raises_error("E-PLAN-004"):
            searched(on=named, goal="fastest")


def test_machines_are_ranked_by_the_price_of_a_provider(compiler: list[CompileRequest]) -> None:
    """In this compiler a step depends on the number of devices only, so the cheapest machine wins."""
    code, text = searched(on="v6e-1,h100-1,a100-80-1,4090-1", as_json=True)
    best = json.loads(text)["plans"][0]
    least = {name: Tariff().price_of(slice_named(name)) for name in ("v6e-1", "h100-1", "a100-80-1", "4090-1")}
    rates = {name: price.usd_per_chip_hour_on_demand for name, price in least.items() if price}
    assert (code, best["slice"]) == (0, min(rates, key=lambda name: rates[name]))
    _, google = searched(on="v6e-1,h100-1,a100-80-1", as_json=True, providers=("gcp",))
    assert {plan["provider"]["on_demand"] for plan in json.loads(google)["plans"]} == {"gcp"}


def test_a_short_run_counts_its_start() -> None:
    """Ten steps take no time beside the start: the machine with the lowest price per hour is the cheapest."""
    space = space_of(job(steps=10, model="qwen3-0.6b"), "h100-8,4090-1", bounds())
    fast, cheap = space.by_slice["h100-8"][0], space.by_slice["4090-1"][0]
    short = search.strategy_of(space, "cheapest", Tariff())
    assert short.standing(cheap, 4.0).score("cheapest") < short.standing(fast, 0.1).score("cheapest")
    long = search.strategy_of(
        space_of(job(steps=10**7, model="qwen3-0.6b"), "h100-8,4090-1", bounds()), "cheapest", Tariff()
    )
    assert long.standing(cheap, 4.0).score("cheapest") > long.standing(fast, 0.1).score("cheapest")


def test_the_written_job_is_the_winner(compiler: list[CompileRequest]) -> None:
    code, text = searched(out_path=Path("best.yaml"))
    assert code == 0
    loaded = load("best.yaml").job
    assert loaded.batch == 16
    assert loaded.micro_batch is not None
    known = result_cache.recall(CompileRequest(ResolvedJob(loaded), compiler[0].slice))
    assert known is not None, "the file asks another question than the search did"
    assert "best.yaml --on v6e-4" in text
    Path("mine.yaml").write_text("model: qwen3-0.6b\n")
    with raises_error("E-PLAN-023"):
        searched(out_path=Path("mine.yaml"))


def test_memory_of_this_machine() -> None:
    assert 0 < search.available_bytes() < 1 << 50


def test_slices_that_the_error_does_not_tell_apart() -> None:
    """Times are known to 25 %: 1.2 s may be 0.9 s, 1.5 s are 1.1 s at least."""
    space = space_of(job(batch=16), "v6e-8,v5p-16,v4-16", bounds())
    seconds = {"v6e-8": 1.0, "v5p-16": 1.2, "v4-16": 1.5}
    picks = [group[0] for group in space.by_slice.values()] + [space.by_slice["v6e-8"][1]]
    verdicts = {one: verdict_of(one.question(space.resolved), seconds[one.slice.name], 1 << 30) for one in picks}
    assert equal_slices(ranked(verdicts, "fastest", Tariff()), "fastest") == ["v5p-16"]
    assert equal_slices([], "fastest") == []


# The progress of a search: counts, the compiles that are left, and the best plan so far.

BEST = "v6e-4 1x4x1 micro-batch 2, remat dots: 1.00 s a step, 2.00 h, $12"


@pytest.fixture
def candidates() -> tuple[Candidate, ...]:
    job = Job.model_validate({"model": "llama3.2-1b", "data": "text", "batch": 8, "steps": 10})
    return space_of(ResolvedJob(job), "v6e-4", Bounds(lambda one: 1.0)).candidates


@pytest.mark.parametrize("columns", [80, 120])
def test_counts_and_clock_fit_on_a_line_each(columns: int, candidates: tuple[Candidate, ...]) -> None:
    board = Scoreboard(3258, 104, stream=io.StringIO())
    for one in candidates[:3]:
        board.started(one)
    board.finished(candidates[0], "1 s a step", BEST, LOOK_AHEAD, 2)
    console = Console(file=io.StringIO(), width=columns, record=True)
    console.print(board.screen())
    counts, clock, *rest = console.export_text().splitlines()
    assert [part.strip() for part in counts.split("·")] == [
        "3258 candidates", "104 from the cache", "1 compiled", f"at least {LOOK_AHEAD} more",
    ]  # fmt: skip
    assert "so far" in clock
    assert "ETA" in clock
    assert all(str(one) in rest[n] for n, one in enumerate(candidates[1:3]))
    assert "best so far" in rest[2]


def test_a_line_per_result_without_a_terminal(candidates: tuple[Candidate, ...]) -> None:
    stream = io.StringIO()
    with Scoreboard(12, 0, stream=stream) as board:
        board.started(candidates[0])
        board.finished(candidates[0], "1 s a step", BEST, 3, 2)
    assert stream.getvalue().startswith("[1, about 3 more")
    assert f"] {candidates[0]}: 1 s a step after" in stream.getvalue()


def test_the_time_left_is_that_of_the_expected_compiles(candidates: tuple[Candidate, ...]) -> None:
    board = Scoreboard(12, 0, stream=io.StringIO())
    assert board.eta_seconds() is None
    board._seconds = [4.0, 8.0]
    board._open, board._workers = 6, 2
    assert board.eta_seconds() == 18.0
