"""A few random small jobs, really compiled: a verdict that adds up, or a refusal that says what to do."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "planner" / "search"))

from job_files import DATA, DATA_TEXT, small_file

from forerun.config.load import load
from forerun.errors import UserError
from forerun.models.sizes import decoder_config
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.pool import answers
from forerun.planner.compile.request import CompileRequest, requests_of, slices_named
from forerun.planner.cost.job_cost import Tariff, job_cost_of
from forerun.planner.report.remedies import does_not_fit
from forerun.resolve.job_corpus import with_steps
from forerun.resolve.resolve_model import resolve_model

pytestmark = pytest.mark.aot

SEEDS = (100, 102, 103, 104, 107, 122)  # five generations; every kind of remat; sequences of 64 to 1000
SIZE = {"float32": 4, "bfloat16": 2}


def question(seed: int, folder: Path) -> CompileRequest | UserError:
    file = small_file(seed)
    path = folder / f"small-{seed}.yaml"
    path.write_text(file.text, "utf-8")
    try:
        [asked] = requests_of(with_steps(resolve_model(load(path).job)), slices_named([file.on]))
    except UserError as error:
        return error
    return asked


def test_small_jobs_are_compiled_or_refused_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / DATA).write_text(DATA_TEXT)
    asked = [question(seed, tmp_path) for seed in SEEDS]
    refusals = [one for one in asked if isinstance(one, UserError)]
    verdicts = answers([one for one in asked if isinstance(one, CompileRequest)])
    assert len(verdicts) >= 4, [str(error) for error in refusals]
    for verdict in verdicts:
        adds_up(verdict)
    refusals += [does_not_fit([verdict]) for verdict in verdicts if not verdict.fits]
    for error in refusals:
        assert error.what, error
        assert error.why, error
        assert error.fix, error


def adds_up(verdict: FitResult) -> None:
    job, mesh = verdict.question.job, verdict.question.mesh_shape()
    memory = verdict.memory
    assert sum(verdict.ledger.values()) == memory.peak_bytes
    assert all(size >= 0 for size in verdict.ledger.values())
    assert verdict.fits == (memory.peak_bytes <= verdict.limit_bytes)
    c = decoder_config(job.model)
    table = c.vocab * c.embed * SIZE[job.precision.params] / (mesh.fsdp * mesh.tp)
    assert memory.weights_bytes >= table, "the embedding alone"
    assert verdict.tokens_per_step == job.batch * job.sequence
    if verdict.step is not None:
        assert math.isfinite(verdict.step.mid_seconds)
        assert 0 < verdict.step.low_seconds <= verdict.step.mid_seconds < verdict.step.high_seconds
        chip = verdict.question.slice.chip
        at_peak = verdict.flops_per_step / ((chip.bf16_flops_per_device or 0) * mesh.devices)
        assert verdict.step.low_seconds >= at_peak, "nothing runs above the data sheet"
        assert verdict.step.low_seconds >= verdict.step.floor_seconds > 0
        assert sum(verdict.step.parts_seconds.values()) == pytest.approx(verdict.step.mid_seconds)
        assert verdict.mfu is not None
        assert 0 < verdict.mfu < 1
        bill = job_cost_of(verdict, Tariff())
        assert bill is not None
        assert 0 < bill.hours.low <= bill.hours.mid <= bill.hours.high < math.inf
