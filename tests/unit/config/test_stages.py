"""A file with stages is a list of ordinary jobs. Expected values are written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from error_assertions import assert_error

from forerun.config.load import json_schema, load
from forerun.config.stages import Stage, stage_named, stages_of
from forerun.errors import UserError

Read = Callable[..., dict[str, Stage]]
FILE = """\
model: {name: qwen3-0.6b, revision: null}
data: {path: texts, validation: 0.02}
optimizer: {lr: 1e-5, b1: 0.8}
stages:
  qat:
    qat: {weights: int8, group: 16, scales: learned}
    distil: {teacher: owner/teacher, cache: logits}
    steps: 2000
    result: best
  recovery:
    lora: {rank: 8, alpha: 8}
    optimizer: {lr: 1e-4}
    steps: 500
  dpo: {preferences: dpo, data: pairs.jsonl, steps: 200}
"""
LORA = "lora: {rank: 8, alpha: 8}, steps: 5"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.chdir(tmp_path)

    def run(text: str, *overrides: str) -> dict[str, Stage]:
        file = tmp_path / "night.yaml"
        file.write_text(text)
        return {stage.name: stage for stage in stages_of(file, overrides)}

    return run


def chain(*stages: str) -> str:
    """A file with these stages, which are written as flow mappings."""
    lines = [f"  {name}: {{{keys}}}" for name, keys in zip("abcd", stages, strict=False)]
    return "\n".join(["model: owner/name", "data: texts", "stages:", *lines])


def mistake(read: Read, text: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as raised:
        read(text, *overrides)
    return raised.value


def test_a_stage_replaces_keys_of_the_file(read: Read, tmp_path: Path) -> None:
    stages = read(FILE)
    assert list(stages) == ["qat", "recovery", "dpo"]
    jobs = {name: stage.job for name, stage in stages.items()}
    assert [job.name for job in jobs.values()] == ["night-qat", "night-recovery", "night-dpo"]
    assert [job.steps for job in jobs.values()] == [2000, 500, 200]
    assert [(job.optimizer.lr, job.optimizer.b1) for job in jobs.values()] == [(1e-5, 0.8), (1e-4, 0.8), (1e-5, 0.8)]
    assert [job.distil is not None for job in jobs.values()] == [True, False, False]
    assert jobs["qat"].distil is not None
    assert jobs["qat"].distil.cache == str(tmp_path / "logits")
    # A section is merged, and a shorthand replaces the complete section.
    assert (jobs["recovery"].data.path, jobs["recovery"].data.validation) == (str(tmp_path / "texts"), 0.02)
    assert (jobs["dpo"].data.path, jobs["dpo"].data.validation) == (str(tmp_path / "pairs.jsonl"), 0)
    assert [stage.result for stage in stages.values()] == ["best", "newest", "newest"]


def test_a_stage_starts_with_the_result_of_the_one_before(read: Read, tmp_path: Path) -> None:
    stages = read(FILE)
    models = [stage.job.model.name for stage in stages.values()]
    runs = tmp_path / "runs"
    assert models == ["qwen3-0.6b", str(runs / "night-qat/model"), str(runs / "night-recovery/model")]
    assert [stage.start for stage in stages.values()] == [None, "model", "model"]
    assert stages["qat"].model_writer is None
    assert stages["dpo"].model_writer is not None
    assert stages["dpo"].model_writer.name == "recovery"


def test_integers_carry_over_until_adapters_are_merged(read: Read) -> None:
    stages = read(FILE)
    qat = stages["recovery"].job.qat
    assert qat is not None
    # Learned scales are not possible under adapters. The scales of the folder are kept anyway.
    assert (qat.weights, qat.group, qat.scales) == ("int8", 16, "computed")
    assert stages["dpo"].job.qat is None
    assert stages["recovery"].loaded.origins["qat.weights"].where == "stage qat"
    assert stages["recovery"].loaded.origins["optimizer.lr"].where == "night.yaml:12"
    changed = read(FILE.replace("    lora: {rank: 8, alpha: 8}\n", "    qat: null\n"))
    assert changed["recovery"].job.qat is None
    kept = read(FILE.replace("    lora: {rank: 8, alpha: 8}\n", ""))
    assert [stage.job.qat for stage in kept.values()] == [kept["qat"].job.qat] * 3


@pytest.mark.parametrize(
    ("first", "second", "start"),
    [
        (LORA, LORA, "adapter"),
        (LORA, "lora: {rank: 4, alpha: 8}", "model"),
        (LORA, "steps: 3", "model"),
        (f"{LORA}, merge: true", LORA, "model"),
        (f"{LORA}, merge: false", LORA, "adapter"),
        (LORA, "lora: {rank: 8, alpha: 8, start: ./other}", "model"),
        (LORA, f"{LORA}, qat: {{weights: int4}}", "model"),
        (f"{LORA}, qat: {{weights: int4}}", LORA, "adapter"),
        (f"{LORA}, qat: {{weights: int4}}", f"{LORA}, qat: null", "model"),
    ],
)
def test_adapters_continue_or_are_merged(first: str, second: str, start: str, read: Read, tmp_path: Path) -> None:
    _, stage = read(chain(first, second)).values()
    assert stage.start == start
    folder = str(tmp_path / "runs/night-a" / start)
    if start == "adapter":
        assert stage.job.lora is not None
        assert (stage.job.model.name, stage.job.lora.start) == ("owner/name", folder)
        assert (stage.job.qat is not None) == ("int4" in first)
    else:
        assert stage.job.model.name == folder


def test_the_reference_of_continued_adapters_includes_them(read: Read) -> None:
    _, second, third = read(
        chain(LORA, f"{LORA}, preferences: dpo", f"{LORA}, preferences: {{reference: base}}")
    ).values()
    assert second.job.preferences is not None
    assert third.job.preferences is not None
    assert (second.job.preferences.reference, third.job.preferences.reference) == ("cached", "base")


def test_overrides_change_all_stages_or_one(read: Read) -> None:
    stages = read(FILE, "batch=4", "stages.dpo.steps=7", "optimizer.lr=1", "name=day", "stages.qat.optimizer.lr=2")
    jobs = [stage.job for stage in stages.values()]
    assert [job.batch for job in jobs] == [4, 4, 4]
    assert [job.steps for job in jobs] == [2000, 500, 7]
    assert [job.optimizer.lr for job in jobs] == [2, 1, 1]
    assert [job.name for job in jobs] == ["day-qat", "day-recovery", "day-dpo"]


def test_a_mistake_in_a_stage_has_its_line(read: Read) -> None:
    assert_error(mistake(read, FILE.replace("steps: 500", "stepz: 500")), "E-JOB-018", why="night.yaml:13", fix="steps")
    assert_error(mistake(read, FILE, "stages.dpo.batch=x"), "E-JOB-020", why="command line")


@pytest.mark.parametrize(
    ("code", "text", "value"),
    [
        ("E-JOB-111", "stages: []", "stages"),
        ("E-JOB-111", "stages: {a: 3}", "a is a value"),
        ("E-JOB-111", "stages: {a/b: {}}", "a/b"),
        ("E-JOB-111", "stages: {a: {lora: {}}, merge: null}", "merge"),
        ("E-JOB-113", "stages: {a: {name: other}}", "all stages"),
        ("E-JOB-113", "stages: {a: {}, b: {model: other/model}}", "stage a"),
        ("E-JOB-114", "stages: {a: {lora: {}, merge: false}, b: {}}", "lora"),
        ("E-JOB-115", "stages: {a: {merge: true}}", "lora"),
        ("E-JOB-116", "stages: {a: {result: last}}", "result"),
        ("E-JOB-116", "stages: {a: {lora: {}, merge: 1}}", "merge"),
    ],
)
def test_impossible_stages_are_rejected(code: str, text: str, value: str, read: Read) -> None:
    assert_error(mistake(read, f"model: owner/name\ndata: texts\n{text}\n"), code, why=value)


def test_a_custom_model_has_one_stage(read: Read) -> None:
    text = "model: my_model:Net\ndata: texts\nstages: {a: {}}\n"
    assert list(read(text)) == ["a"]
    assert_error(mistake(read, text.replace("{}", "{}, b: {}")), "E-JOB-117", what="my_model:Net")


def test_unknown_stages_are_rejected(read: Read) -> None:
    assert_error(mistake(read, FILE, "stages.recover.steps=1"), "E-JOB-112", fix="recovery")
    stages = list(read(FILE).values())
    assert stage_named(stages, "dpo") is stages[2]
    with pytest.raises(UserError) as raised:
        stage_named((), "dpo")
    assert_error(raised.value, "E-JOB-112", fix="--stage")


def test_a_file_with_stages_is_not_one_job(read: Read, tmp_path: Path) -> None:
    read(FILE)
    with pytest.raises(UserError) as raised:
        load(tmp_path / "night.yaml")
    assert_error(raised.value, "E-JOB-110", why="qat, recovery, dpo", fix="--stage")


def test_a_file_without_stages_has_none(read: Read) -> None:
    assert read("model: owner/name\ndata: texts\n") == {}


def test_the_schema_knows_stages() -> None:
    schema: dict[str, Any] = json_schema()
    stage = schema["properties"]["stages"]["additionalProperties"]
    assert {"merge", "result", "lora", "steps"} <= set(stage["properties"])
    assert not {"name", "runs", "stages"} & set(stage["properties"])
