"""Stages in the Python API: a mapping of jobs, and plans that report a later stage that does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from error_assertions import assert_error

import forerun as fr
from forerun.verbs.stages import StagesPlan


@dataclass(frozen=True)
class FixedPlan:
    """A plan with fixed rows."""

    rows: list[dict[str, Any]]

    @property
    def fits(self) -> bool:
        return any(row["fits"] for row in self.rows)

    def require_fit(self) -> FixedPlan:
        if not self.fits:
            raise fr.UserError("E-PLAN-999", "the job does not fit v6e-1", why="3 GiB short", fix="a larger slice")
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"slices": self.rows}


def plan(usd: float | None) -> fr.Plan:
    cost = {"on_demand": usd, "spot": None}
    return cast(fr.Plan, FixedPlan([{"slice": "v6e-1", "fits": usd is not None, "hours": usd, "cost_usd": cost}]))


def test_a_later_stage_that_does_not_fit_is_reported() -> None:
    found = StagesPlan({"qat": plan(1.0), "dpo": plan(None)})
    assert not found.fits
    with pytest.raises(fr.UserError) as raised:
        found.require_fit()
    assert_error(raised.value, "E-PLAN-999", what="stage dpo", why="3 GiB")
    assert found.to_dict()["totals"][0]["misfits"] == ["dpo"]


def test_the_budget_is_for_all_stages() -> None:
    found = StagesPlan({"qat": plan(1.0), "dpo": plan(2.0)}, max_usd=2.5)
    assert found.fits
    with pytest.raises(fr.UserError) as raised:
        found.require_fit()
    assert_error(raised.value, "E-COMMAND-041", what="2.5", why="3")
    assert StagesPlan(found.plans, max_usd=3.0).require_fit().totals[0].on_demand_usd == 3.0


def test_stages_are_a_mapping_of_jobs(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: qwen3-0.6b\ndata: texts\nstages: {a: {steps: 1}, b: {steps: 2}}\n")
    stages = fr.load_stages(file, "stages.b.steps=3", f"runs={tmp_path / 'runs'}")
    assert {name: job.steps for name, job in stages.items()} == {"a": 1, "b": 3}
    assert (len(stages), "c" in stages) == (2, False)
    with pytest.raises(KeyError):
        stages["c"]
    planned = stages.planned_job("b")
    assert planned.model.name != stages["b"].model.name
    assert stages["b"].model.name == str(tmp_path / f"runs/{tmp_path.name}-a/model")


def test_a_file_without_stages_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: qwen3-0.6b\ndata: texts\n")
    with pytest.raises(fr.UserError) as raised:
        fr.load_stages(tmp_path / "job.yaml")
    assert_error(raised.value, "E-JOB-118")
