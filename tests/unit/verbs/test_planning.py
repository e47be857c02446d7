"""Notes of a plan about the kind of model."""

from __future__ import annotations

import pytest

from forerun.config.schema import Job
from forerun.resolve.resolved_job import ResolvedJob
from forerun.verbs.plan import _model_notes


@pytest.mark.parametrize(("model", "notes"), [("qwen3.5-0.8b", 1), ("qwen3-0.6b", 0), ("smollm2-135m", 0)])
def test_only_models_with_delta_layers_have_a_note(model: str, notes: int) -> None:
    job = Job.model_validate({"model": model, "data": "nothing", "steps": 1})
    assert len(_model_notes(ResolvedJob(job))) == notes
