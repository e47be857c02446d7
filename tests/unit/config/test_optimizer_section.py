"""The optimizer section: defaults that depend on the name, and keys that an optimizer does not use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from error_assertions import assert_error

from forerun.config.load import dump, load, origins_of, values
from forerun.config.optimizer import NAMES
from forerun.config.schema import Job
from forerun.errors import UserError


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text("model: qwen3-0.6b\ndata: texts\n")
    return file


def optimizer(file: Path, *words: str) -> Any:
    return load(file, words).job.optimizer


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw", (3e-4, 0.1, 0.9, 0.95, 1e-8)),
        ("adamw8bit", (3e-4, 0.1, 0.9, 0.95, 1e-8)),
        ("muon", (3e-4, 0.1, 0.9, 0.95, 1e-8)),
        ("lion", (1e-4, 0.3, 0.9, 0.99, None)),
        ("adafactor", (1e-2, 0.0, None, None, None)),
    ],
)
def test_defaults_depend_on_the_name(name: str, expected: Any, job_file: Path) -> None:
    o = optimizer(job_file, f"optimizer.name={name}")
    assert (o.lr, o.weight_decay, o.b1, o.b2, o.eps) == expected
    assert (o.muon is not None) == (name == "muon")
    assert optimizer(job_file, f"optimizer.name={name}", "optimizer.lr=0.5").lr == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_dumped_job_loads_as_the_same_job(name: str, job_file: Path) -> None:
    words = (f"optimizer.name={name}", "optimizer.groups=[{match: [embed, '*norm'], lr_scale: 0.1}]")
    job = load(job_file, [*words, "optimizer.schedule=wsd"]).job
    for defaults in (True, False):
        assert Job.model_validate(yaml.safe_load(dump(job, defaults=defaults))) == job
    assert Job.model_validate(job.model_dump(mode="json")) == job
    assert values(job)["optimizer.groups"] == [{"match": ("embed", "*norm"), "lr_scale": 0.1}]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["optimizer.name=adamx"], "E-JOB-090", "adamw"),
        (["optimizer.name=paged_adamw_8bit"], "E-JOB-090", "adamw8bit"),
        (["optimizer.name=my-mod:Own", "optimizer.lr=1"], "E-JOB-090", "my-mod:Own"),
        (["optimizer.name=lion", "optimizer.eps=1e-8"], "E-JOB-091", "optimizer.eps"),
        (["optimizer.name=adafactor", "optimizer.b2=0.99"], "E-JOB-091", "optimizer.b2"),
        (["optimizer.muon.momentum=0.9"], "E-JOB-091", "optimizer.muon"),
        (["optimizer.options={a: 1}"], "E-JOB-091", "optimizer.options"),
        (["optimizer.name=optax:sgd", "optimizer.lr=1", "optimizer.b1=0.9"], "E-JOB-091", "optimizer.options"),
        (["optimizer.decay=0.1"], "E-JOB-092", "optimizer.decay"),
        (["optimizer.schedule=linear", "optimizer.power=2"], "E-JOB-092", "optimizer.power"),
        (["optimizer.schedule=wsd", "optimizer.cycles=2"], "E-JOB-092", "optimizer.cycles"),
        (["optimizer.schedule=inverse_sqrt", "optimizer.final_lr=0.1"], "E-JOB-092", "optimizer.final_lr"),
        (["optimizer.name=optax:sgd"], "E-JOB-093", "optimizer.lr"),
        (
            ["optimizer.name=optax:sgd", "optimizer.lr=1", "optimizer.groups=[{match: a, weight_decay: 0}]"],
            "E-JOB-094",
            "lr_scale",
        ),
    ],
)
def test_a_key_that_is_not_used_is_an_error(words: list[str], code: str, named: str, job_file: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(job_file, words)
    assert caught.value.code == code
    assert named in f"{caught.value.what}; {caught.value.fix}"


def test_a_schedule_of_another_trainer_is_suggested(job_file: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(job_file, ["optimizer.schedule=warmup_stable_decay"])
    assert_error(caught.value, "E-JOB-020", fix="wsd")


def test_null_is_the_default(job_file: Path) -> None:
    assert optimizer(job_file, "optimizer.b2=null").b2 == 0.95
    assert optimizer(job_file, "optimizer.name=lion", "optimizer.b2=null", "optimizer.eps=null").b2 == 0.99


def test_defaults_of_an_optimizer_are_not_reported_as_set() -> None:
    job = Job.model_validate({"model": "qwen3-0.6b", "data": "x", "optimizer": {"name": "lion", "b1": 0.95}})
    origins = origins_of(job)
    assert {key for key in origins if key.startswith("optimizer.") and origins[key].kind != "default"} == {
        "optimizer.name",
        "optimizer.b1",
    }
