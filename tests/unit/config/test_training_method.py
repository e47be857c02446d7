"""The answers of `job.method` for all combinations of method sections, against a table."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.config.training_method import TrainingMethod

PLAIN: dict[str, Any] = {
    "trains_adapters": False,
    "initial_adapter": None,
    "exports_adapter": False,
    "may_hold_other_weights": False,
    "integer_weights": None,
    "trains_rounded_weights": False,
    "recomputes_scales": False,
    "data_is_pairs": False,
    "runs_teacher": False,
}
ADAPTERS = {"trains_adapters": True, "exports_adapter": True, "may_hold_other_weights": True}
ROUNDED = {"integer_weights": "int4", "trains_rounded_weights": True}
LIVE = {"runs_teacher": True, "may_hold_other_weights": True}


def job(**values: Any) -> Job:
    return Job.model_validate({"model": "qwen3-0.6b", "data": "text", **values})


@pytest.mark.parametrize(
    ("sections", "answers"),
    [
        ({}, {}),
        ({"lora": {}}, ADAPTERS),
        ({"lora": {"start": "folder"}}, {**ADAPTERS, "initial_adapter": "folder"}),
        ({"qat": {}}, {**ROUNDED, "recomputes_scales": True}),
        (
            {"qat": {"weights": "int8", "scales": "learned"}},
            {**ROUNDED, "integer_weights": "int8", "may_hold_other_weights": True},
        ),
        ({"qat": {}, "lora": {}}, {**ADAPTERS, "exports_adapter": False, "integer_weights": "int4"}),
        ({"preferences": "dpo"}, {"data_is_pairs": True}),
        ({"preferences": {"reference": "beside"}}, {"data_is_pairs": True, "may_hold_other_weights": True}),
        ({"preferences": "dpo", "lora": {}}, {**ADAPTERS, "data_is_pairs": True}),
        ({"distil": "owner/name"}, LIVE),
        ({"distil": {"teacher": "owner/name", "cache": "folder"}}, {**LIVE, "runs_teacher": False}),
        ({"distil": "owner/name", "lora": {}}, {**ADAPTERS, **LIVE}),
    ],
    ids=str,
)
def test_answers(sections: dict[str, Any], answers: dict[str, Any]) -> None:
    method = job(**sections).method
    assert {name: getattr(method, name) for name in PLAIN} == {**PLAIN, **answers}
    assert (method.adapter is not None) == ("lora" in sections)
    assert (method.teacher is not None) == ("distil" in sections)


def test_the_table_asks_every_question() -> None:
    own = {name for name, member in vars(TrainingMethod).items() if isinstance(member, property)}
    assert own == {*PLAIN, "adapter", "teacher"}
    assert {field.name for field in fields(TrainingMethod)} == {"lora", "qat", "distil", "preferences"}


def test_a_revision_and_a_folder_can_be_replaced() -> None:
    both = job(distil={"teacher": "owner/name", "soft": 0.25}, lora={"rank": 4, "start": "old"})
    moved = both.with_teacher_revision("abc").with_initial_adapter("new")
    assert moved == job(
        distil={"teacher": "owner/name", "soft": 0.25, "revision": "abc"}, lora={"rank": 4, "start": "new"}
    )
    assert job().with_teacher_revision("abc").with_initial_adapter("new") == job()
