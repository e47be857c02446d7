"""One random job file through everything of `plan` that needs no compiler, with the checks of the result.

Nothing but a `UserError` may come out. Every error says what, why and fix. A plan keeps the job's batch, fills its
slice, and costs what a sum computed here says.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_files import DATA, DATA_TEXT, JobFile, job_file
from rich.console import Console

from forerun.config.load import dump, load
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.prices import cheapest
from forerun.hardware.slices import Slice
from forerun.models.decoder_config import DecoderConfig, ExpertConfig
from forerun.models.layer_kinds import LayerShape
from forerun.models.sizes import decoder_config, is_plugin
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest, from_json, requests_of, slices_named
from forerun.planner.cost.job_cost import ASSUMPTIONS, Tariff, job_cost_of
from forerun.planner.memory import MemoryReport
from forerun.planner.report.page import page
from forerun.planner.report.plan_json import as_json
from forerun.planner.report.remedies import does_not_fit, nearest, over_budget, remedies
from forerun.planner.report.table import print_table
from forerun.planner.search.default_slices import Needs, default_slices
from forerun.planner.search.job_file import winning_job
from forerun.planner.search.ranking import ranked, shown
from forerun.planner.search.space import Bounds, Space, slices_like, space_of
from forerun.planner.search.strategy import GOALS, Outcome, Strategy
from forerun.planner.time.step_time import StepTime
from forerun.resolve.job_corpus import with_steps
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import Bytes, Seconds

MAX_VERDICTS = 12
SIZE = {"float32": 4, "bfloat16": 2}


def finite(*numbers: float | None) -> bool:
    return all(number is None or (math.isfinite(number) and number >= 0) for number in numbers)


class Trial:
    """One job file, asked about as the command would; refusals are collected on the way."""

    def __init__(self, file: JobFile, folder: Path) -> None:
        self.file, self.folder = file, folder
        self.refusals: list[UserError] = []
        self.job: Job | None = None
        self.planned = False

    def attempt(self, part: Callable[[], Any]) -> Any:
        """What a part gives, or None if it refuses."""
        try:
            return part()
        except UserError as error:
            self.refused(error)
            return None

    def refused(self, error: UserError) -> None:
        for text in (error.what, error.why, error.fix):
            assert text.strip(), f"an empty line in: {error}"
            assert "None" not in text.split(), f"a Python word in: {error}"
            assert not re.search(r"\b(nan|inf|Traceback)\b", text.replace(".inf", "").replace(".nan", "")), str(error)
        self.refusals.append(error)

    def run(self) -> None:
        """Everything of `plan` but the compiler."""
        asked = self.asked()
        if asked is None:
            return
        resolved, tariff = asked
        job = resolved.job
        again = self.folder / f"again-{self.file.seed}.yaml"
        again.write_text(dump(job), "utf-8")
        assert load(again).job == job, "a job that is written out is the same job"
        self._compared(resolved, tariff)
        self._searched(resolved, tariff)

    def asked(self) -> tuple[ResolvedJob, Tariff] | None:
        """The file is read and laid out on the slices of `--on`."""
        path = self.folder / f"job-{self.file.seed}.yaml"
        path.write_bytes(self.file.text.encode())
        loaded = self.attempt(lambda: load(path, self.file.overrides))
        if loaded is None:
            return None
        self.job = loaded.job
        tariff = self.attempt(self._tariff)
        resolved = self.attempt(lambda: with_steps(resolve_model(loaded.job)))
        if tariff is None or resolved is None:
            return None
        self._as_asked(resolved)
        return resolved, tariff

    def _tariff(self) -> Tariff:
        prices = self.folder / f"prices-{self.file.seed}.csv"
        if self.file.prices is not None:
            prices.write_text(self.file.prices)
        tariff = Tariff(self.file.zone, str(prices) if self.file.prices else None, self.file.max_usd)
        tariff.check()
        return tariff

    def _as_asked(self, resolved: ResolvedJob) -> None:
        """`--on`: one question for each slice."""
        for one in (self.attempt(lambda: slices_like(self.file.on)) or [])[:4]:
            for question in self.attempt(lambda on=one: requests_of(resolved, [on])) or []:
                layout(question.job, question, resolved.job.batch)
                assert from_json(question.to_json()) == question
                self.planned = True

    def _compared(self, resolved: ResolvedJob, tariff: Tariff) -> None:
        """Without `--on`: the sensible slices of every generation."""
        choice = self.attempt(lambda: default_slices(resolved))
        if choice is None:
            if self.refusals[-1].what.startswith("no slice of any generation"):
                self._led_out(self.refusals[-1].fix)
            return
        needs = Needs.of(resolved)
        for one in [one for own in choice.by_generation.values() for one in own]:
            layout(one.question.job, one.question, resolved.job.batch)
            assert finite(needs.per_device_bytes(one.question))
            assert needs.per_device_bytes(one.question) <= (one.question.slice.chip.usable_bytes or 0)
        first = choice.first()
        verdicts = [made_up(one.question, n) for n, one in enumerate(first)]
        second = choice.second(verdicts)
        assert len(first) + len(second) <= 12
        assert choice.notes(first + second) is not None
        self.planned = True
        self._told(resolved.job, verdicts, tariff)

    def _led_out(self, fix: str) -> None:
        """Whoever follows the advice gets a plan for the slice that it names."""
        found = re.fullmatch(r"with (.*) it might fit: --on (\S+)", fix)
        if not found:
            assert fix.startswith("make the "), fix
            return
        path = self.folder / f"job-{self.file.seed}.yaml"
        mended = with_steps(resolve_model(load(path, [*self.file.overrides, *shlex.split(found[1])]).job))
        [question] = requests_of(mended, slices_named([found[2]]))
        assert Needs.of(mended).per_device_bytes(question) <= (question.slice.chip.usable_bytes or 0)

    def _told(self, job: Job, verdicts: list[FitResult], tariff: Tariff) -> None:
        for verdict in verdicts:
            money(verdict, tariff)
        numbers = list(leaves(as_json(verdicts, tariff)))
        assert finite(*numbers)
        if self.file.seed % 40 == 0:
            print_table(Console(file=io.StringIO(), width=120), verdicts, job.name, tariff)
        if self.file.seed % 10 == 0:
            assert page(job, verdicts, tariff, job.name, []).startswith("<!")
        tight = [v for v in verdicts if not v.fits]
        if tight:
            for remedy in remedies(nearest(tight)):
                layout(remedy.job, CompileRequest(remedy.resolved, nearest(tight).question.slice), job.batch)
            self.refused(does_not_fit(tight))
        if tariff.max_usd is not None and (error := over_budget(verdicts, tariff)):
            self.refused(error)

    def _searched(self, resolved: ResolvedJob, tariff: Tariff) -> None:
        """`--search`, with a compiler that says what the formulas say."""
        job = resolved.job
        on = None if self.file.seed % 4 == 0 and job.batch < 1000 else self.file.on
        bounds = Bounds(lambda one: usd_per_hour(one, tariff), self.file.max_hours, self.file.max_usd)
        space: Space | None = self.attempt(lambda: space_of(resolved, on, bounds))
        if space is None:
            return
        assert space.size == len(space.candidates) + sum(space.ruled_out.values())
        assert len(set(space.candidates)) == len(space.candidates), "no candidate stands twice"
        for one in space.candidates:
            assert one.micro_batch * one.mesh.data * one.mesh.fsdp * one.accumulation(job.batch) == job.batch
            assert one.mesh.data * one.mesh.fsdp * one.mesh.tp == (job.devices or one.slice.devices)
        if not space.candidates:
            return
        assert space.sizes.resting_bytes == Needs.of(resolved).state_bytes
        assert space.sizes.parameters == parameters(job)
        goal = GOALS[self.file.seed % 3]
        rates = {name: bounds.usd_per_hour(group[0].slice) for name, group in space.by_slice.items()}
        per_second = {name: None if rate is None else rate / 3600 for name, rate in rates.items()}
        strategy = Strategy(space, goal, per_second)
        verdicts: dict[Any, FitResult] = {}
        known: dict[Any, Outcome] = {}
        while len(known) < MAX_VERDICTS and (one := strategy.next(known)):
            assert finite(space.guessed_seconds(one), space.guessed_bytes(one))
            assert space.guessed_seconds(one) > 0
            question = one.question(resolved)
            layout(question.job, question, resolved.job.batch)
            verdicts[one] = made_up(question, 2 * len(known), space.guessed_seconds(one), space.guessed_bytes(one))
            step = verdicts[one].step
            known[one] = Outcome(step.mid_seconds if step else None, verdicts[one].memory.peak_bytes)
        order = ranked(verdicts, goal, tariff, self.file.max_hours)
        assert len(order) == sum(v.fits for v in verdicts.values())
        assert [one.within for one in order] == sorted((one.within for one in order), reverse=True)
        for found in order:
            money(found.verdict, tariff)
            assert finite(found.hours, found.usd)
        if order:
            assert any(one.on_front for one in shown(order, 3))
            text = winning_job(resolved, order[0], order, goal, None)
            path = self.folder / f"winner-{self.file.seed}.yaml"
            path.write_text(text, "utf-8")
            winner, planned = load(path).job, order[0].candidate.changed(resolved).job
            assert winner.model_copy(update={"device": planned.device}) == planned
            assert winner.device in (planned.device, order[0].candidate.slice.platform)


def layout(job: Job, question: CompileRequest, batch: int) -> None:
    """The batch and the devices that the user asked for, by arithmetic of our own."""
    heads = None if is_plugin(job.model) else decoder_config(job.model).heads
    derived = question.derived()
    mesh = derived.mesh
    assert job.batch == batch
    assert derived.micro_batch * derived.accumulation * mesh.data * mesh.fsdp == batch
    assert mesh.data * mesh.fsdp * mesh.tp == (job.devices or question.slice.devices)
    assert heads is None or heads % mesh.tp == 0
    assert derived.tokens_per_step == batch * job.sequence
    assert 0 <= derived.warmup_steps <= derived.steps == job.steps


def parameters(job: Job) -> int:
    c = decoder_config(job.model)
    tables = c.vocab * c.embed * (1 if c.tied else 2)
    mixers = sum(
        delta(c.embed, kind.shape) if kind.mixer == "delta" else attention(c, kind.shape) for kind in c.all_kinds
    )
    norms = (4 if c.norms == "both" else 2) * c.embed + (1 if c.layer_scalar else 0)
    mlps = (3 * c.embed * c.mlp if c.has_mlp else 0) + experts(c.embed, c.experts)
    return mixers + c.layers * (norms + mlps) + tables + c.embed


def attention(c: DecoderConfig, shape: LayerShape | None) -> int:
    """The parameters of the attention of one layer, with the norms of its heads."""
    width, kv_heads, values = c.head_dim, c.kv_heads, 1
    if shape is not None:
        width, kv_heads = shape.head_dim or width, shape.kv_heads or kv_heads
        values = 0 if shape.key_is_value else 1
    queries = 3 if c.attention_gate else 2  # queries, their gates and the output
    biases = (width * (c.heads + 2 * kv_heads) if c.qkv_bias else 0) + (c.embed if c.out_bias else 0)
    others = biases + (c.heads if c.attention_sinks else 0) + (2 * width if c.qk_norm else 0)
    return c.embed * width * (queries * c.heads + (1 + values) * kv_heads) + others


def experts(embed: int, config: ExpertConfig | None) -> int:
    """The parameters of the experts of one layer, with their router and what an MLP beside them adds."""
    if config is None:
        return 0
    biases = 1 + 2 * config.mlp + embed if config.bias else 0
    beside = 4 * embed + config.count if config.beside else 0  # three norms, the router's, and a scale of each expert
    return config.count * (embed + 3 * embed * config.mlp + biases) + (embed if config.shared else 0) + beside


def delta(embed: int, shape: Any) -> int:
    """The parameters of a gated delta layer of Qwen3.5, without the norms of the width of the model."""
    keys, values = shape.kv_heads * shape.head_dim, shape.heads * shape.value_dim
    convolution = shape.width * (2 * keys + values)
    return embed * (2 * keys + 3 * values + 2 * shape.heads) + convolution + 2 * shape.heads + shape.value_dim


def made_up(question: CompileRequest, n: int, seconds: float = 0.37, peak_bytes: float = 0) -> FitResult:
    """What a compiler might say; every third program is too large."""
    job, mesh = question.job, question.mesh_shape()
    weights = parameters(job) * SIZE[job.precision.params] // (mesh.fsdp * mesh.tp) + 1
    limit = question.slice.chip.usable_bytes or 0
    peak = max(int(peak_bytes), 4 * weights + 1000)
    peak = limit * 3 // 2 + 3 * weights if n % 3 == 1 or peak > limit else peak
    memory = MemoryReport(*(Bytes(size) for size in (peak, weights, 2 * weights, 100, 0)))
    fits = peak <= limit
    parts = {"weights": memory.weights_bytes, "working activations": Bytes(peak - weights)}
    step = StepTime(seconds, {"matmul": seconds / 2, "collectives not hidden": seconds / 2}) if fits else None
    tokens = job.batch * job.sequence
    return FitResult(question, memory, fits, Seconds(1), "x", str(mesh), 6.0 * tokens, tokens, parts, step)


def usd_per_hour(one: Slice, tariff: Tariff) -> float | None:
    per_host = one.chips // one.hosts
    price = cheapest(
        one.chip.name, tariff.zone, hosts=one.hosts, override_file=tariff.prices_file, chips_per_host=per_host
    )
    return None if price is None else price.usd_per_chip_hour_on_demand * one.chips


def money(verdict: FitResult, tariff: Tariff) -> None:
    """Hours are at least the steps, dollars are hours x price, and what is written is at least what is kept."""
    bill = job_cost_of(verdict, tariff)
    if bill is None:
        assert not verdict.fits
        return
    job, step = verdict.question.job, verdict.step
    assert job.steps is not None
    assert step is not None
    assert finite(*vars(bill.hours).values(), bill.steps_lost_per_preemption, bill.written_bytes, bill.kept_bytes)
    assert bill.hours.low <= bill.hours.mid <= bill.hours.high
    least = job.steps * step.mid_seconds / 3600
    assert bill.hours.mid >= least
    every = bill.best_every if job.checkpoint.every == "auto" else job.checkpoint.every
    assert bill.saves.every == every
    saves = math.ceil(job.steps / every)
    pause, write = bill.saves.pause_seconds, bill.saves.write_seconds
    late = max(0.0, write - every * step.mid_seconds)
    begin = ASSUMPTIONS.start_seconds + ASSUMPTIONS.compile_seconds
    seconds = begin + job.steps * step.mid_seconds + saves * pause + (saves - 1) * late + write
    assert bill.hours.mid == pytest.approx(seconds / 3600)
    assert 1 <= bill.best_every <= job.steps
    assert bill.written_bytes >= bill.kept_bytes > 0
    rate = usd_per_hour(verdict.question.slice, tariff)
    assert (bill.on_demand is None) == (rate is None)
    if bill.on_demand is not None and rate is not None:
        assert bill.on_demand.usd.mid == pytest.approx(bill.hours.mid * rate)
    if bill.spot is not None:
        assert bill.spot_hours is not None
        assert finite(bill.preemptions, bill.spot_overhead, bill.spot.usd.mid, bill.spot_hours.high)
        assert bill.spot_hours.mid >= bill.hours.mid


def leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    elif isinstance(value, (int, float)):
        yield value


def normalised(error: UserError) -> str:
    """The text without what differs from file to file."""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", error.what.splitlines()[0])
    return re.sub(r"\S*\d\S*", "#", plain)


def read_and_planned(seeds: range, folder: Path, part: Callable[[Trial], object]) -> list[Trial]:
    (folder / DATA).write_text(DATA_TEXT)
    trials = [Trial(job_file(seed), folder) for seed in seeds]
    for trial in trials:
        file = trial.file
        try:
            part(trial)
        except Exception as error:
            asked = f"overrides {file.overrides}, --on {file.on}\n{file.text[:2000]}"
            raise AssertionError(f"seed {file.seed}: {type(error).__name__}: {error}\n{asked}") from error
    return trials
