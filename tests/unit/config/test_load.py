from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from forerun.config import keys
from forerun.config.load import LoadedJob, Origin, dump, json_schema, load, values
from forerun.config.schema import Job
from forerun.errors import UserError

Load = Callable[..., LoadedJob]
SMALL = "model: qwen3-0.6b\ndata: texts\n"


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    def run(text: str, *overrides: str) -> LoadedJob:
        file = tmp_path / "job.yaml"
        file.write_text(text)
        return load(file, overrides)

    return run


def test_two_lines_are_a_job(load_text: Load, tmp_path: Path) -> None:
    loaded = load_text(SMALL)
    assert loaded.job == Job.model_validate(
        {"model": "qwen3-0.6b", "data": str(tmp_path / "texts"), "name": tmp_path.name}
    )
    assert loaded.path == tmp_path / "job.yaml"
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.path = Path()  # type: ignore[misc]


def test_the_file_names_the_run(tmp_path: Path) -> None:
    file = tmp_path / "night.v2.yaml"
    file.write_text(SMALL)
    assert load(file).job.name == "night.v2"
    assert load(file).origins["name"].kind == "default"
    assert load(str(file), ["name=day"]).job.name == "day"


def test_every_leaf_has_an_origin(load_text: Load) -> None:
    loaded = load_text(SMALL + "optimizer:\n  lr: 1e-3\n  b1: 0.8\n", "optimizer.b1=0.7", "batch=8")
    assert list(loaded.origins) == list(values(loaded.job))
    assert set(loaded.origins) == _leaves_of(loaded.job)
    assert {key: origin for key, origin in loaded.origins.items() if origin.kind != "default"} == {
        "model.name": Origin("file", "job.yaml:1"),
        "data.path": Origin("file", "job.yaml:2"),
        "optimizer.lr": Origin("file", "job.yaml:4"),
        "optimizer.b1": Origin("override", "command line"),
        "batch": Origin("override", "command line"),
    }
    assert loaded.origins["optimizer.b2"] == Origin("default", "default")
    assert (loaded.job.optimizer.lr, loaded.job.optimizer.b1, loaded.job.batch) == (1e-3, 0.7, 8)


def _leaves_of(job: Job) -> set[str]:
    """From the JSON text of the job, which knows nothing of sections."""

    def walk(value: Any, path: str) -> set[str]:
        if isinstance(value, dict) and value:
            return set().union(*(walk(inner, f"{path}.{name}") for name, inner in value.items()))
        return {path[1:]}

    return walk(json.loads(job.model_dump_json()), "")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer.lr=8e-5", "optimizer.lr", 8e-5),
        ("optimizer.lr=1", "optimizer.lr", 1),
        ("mesh.fsdp=8", "mesh.fsdp", 8),
        ("mesh.fsdp=-1", "mesh.fsdp", -1),
        ("data.path=gs://bucket/x", "data.path", "gs://bucket/x"),
        ("data=s3://bucket/x", "data.path", "s3://bucket/x"),
        ("device=[tpu,cpu]", "device", ("tpu", "cpu")),
        ("device=cpu", "device", "cpu"),
        ("remat=none", "remat.policy", "none"),
        ("remat={policy: named, keep: [query]}", "remat.keep", ("query",)),
        ("optimizer.clip=null", "optimizer.clip", None),
        ("model.layers=4", "model.layers", 4),
        ("model.tied=false", "model.tied", False),
        ("model.rope_scaling.factor=4", "model.rope_scaling.factor", 4),
        ("model.options.size=3", "model.options.size", 3),
        ("sample.prompt=no", "sample.prompt", "no"),
        ("sample.prompt=a=b", "sample.prompt", "a=b"),
        ("sample.prompt=The king ", "sample.prompt", "The king"),
        ('sample.prompt="The king "', "sample.prompt", "The king "),
    ],
)
def test_overrides(load_text: Load, override: str, key: str, value: object) -> None:
    loaded = load_text(SMALL, override)
    assert values(loaded.job)[key] == value
    assert loaded.origins[key] == Origin("override", "command line")


def test_shorthand_and_overrides_compose(load_text: Load) -> None:
    model = load_text(SMALL, "model.layers=4").job.model
    assert (model.name, model.layers) == ("qwen3-0.6b", 4)
    named = SMALL + "remat: {policy: named, keep: [query]}\n"
    assert load_text(named, "remat=none").job.remat.keep == ()
    model = load_text(SMALL, "model=llama3.2-1b", "model.layers=2").job.model
    assert (model.name, model.layers) == ("llama3.2-1b", 2)
    assert load_text(SMALL, "model.layers=2", "model=llama3.2-1b").job.model.layers is None
    assert load_text(SMALL, "batch=4", "batch=8").job.batch == 8


def test_origin_of_a_replaced_section_is_forgotten(load_text: Load) -> None:
    text = SMALL + "optimizer:\n  lr: 1e-3\n  b1: 0.8\n"
    origins = load_text(text, "optimizer={lr: 1e-4}").origins
    assert origins["optimizer.lr"].kind == "override"
    assert origins["optimizer.b1"].kind == "default"


def test_paths_are_seen_from_the_file_or_from_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text("model: x\ndata:\n  path: ../texts\n  tokenizer: t/tokenizer.json\n")
    monkeypatch.chdir(tmp_path)
    data = load("jobs/job.yaml").job.data
    assert (data.path, data.tokenizer) == (str(tmp_path / "texts"), str(tmp_path / "jobs/t/tokenizer.json"))
    data = load("jobs/job.yaml", ["data.path=here", "data.tokenizer=bytes"]).job.data
    assert (data.path, data.tokenizer) == (str(tmp_path / "here"), "bytes")
    data = load("jobs/job.yaml", ["data=here"]).job.data
    assert (data.path, data.tokenizer) == (str(tmp_path / "here"), None)
    data = load("jobs/job.yaml", ["data.path=https://host/x.txt", "data.tokenizer=/abs/t.json"]).job.data
    assert (data.path, data.tokenizer) == ("https://host/x.txt", "/abs/t.json")
    monkeypatch.setenv("HOME", "/home/someone")
    assert load("jobs/job.yaml", ["data.path=~/x"]).job.data.path == "/home/someone/x"


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("./tiny", "jobs/tiny"),
        ("../tiny", "tiny"),
        ("sub/tiny", "jobs/sub/tiny"),  # there is a checkpoint: a folder
        ("owner/name", None),
        ("qwen3-0.6b", None),
        ("package.net:Net", None),
    ],
)
def test_a_checkpoint_folder_is_seen_from_the_file(tmp_path: Path, written: str, means: str | None) -> None:
    (tmp_path / "jobs/sub/tiny").mkdir(parents=True)
    (tmp_path / "jobs/sub/tiny/config.json").write_text("{}")
    (tmp_path / "jobs/job.yaml").write_text(f"model: {written}\ndata: x\n")
    name = load(str(tmp_path / "jobs/job.yaml")).job.model.name
    assert name == (written if means is None else str(tmp_path / means))


def test_a_written_job_loads_back_equal(load_text: Load, tmp_path: Path) -> None:
    job = load_text(
        SMALL,
        "name='8e-5'",
        "optimizer.lr=8e-5",
        "device=[tpu,cpu]",
        "remat={policy: named, keep: [query], offload: [key]}",
        "model.options={no: on, deep: {'1e3': ['1', 1, null]}}",
        "model.rope_scaling={factor: 4}",
        "sample.prompt='a: b # c\n  é'",
    ).job
    elsewhere = tmp_path / "runs" / "x"
    elsewhere.mkdir(parents=True)
    (elsewhere / "job.yaml").write_text(dump(job), encoding="utf-8")
    assert load(elsewhere / "job.yaml").job == job


def test_json_schema_knows_every_key_and_the_shorthands() -> None:
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["title"] == "forerun job"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model", "data"]
    for name in ("model", "data", "remat"):
        assert {"type": "string"} in schema["properties"][name]["anyOf"]
    assert "anyOf" not in schema["properties"]["mesh"]
    sections = {kind.__name__: kind for kind in _sections(Job)}
    # The parts of a mixture have names of the user's own, and the groups of the optimizer are a list.
    assert set(schema["$defs"]) == {*sections, "Part", "ParamGroup"}
    for name, section in sections.items():
        assert set(schema["$defs"][name]["properties"]) == set(section.model_fields)
    assert all("description" in field for field in schema["$defs"]["Optimizer"]["properties"].values())
    json.dumps(schema)


def _sections(kind: type[BaseModel]) -> set[type[BaseModel]]:
    inner = {keys.section_of(field) for field in kind.model_fields.values()} - {None}
    return set().union(inner, *(_sections(section) for section in inner if section))  # type: ignore[arg-type]


def test_every_default_has_a_reason() -> None:
    silent = [key for key, field in keys.fields().items() if not keys.section_of(field) and not keys.reason(key)]
    assert silent == []


KEYS = sorted({part for key in keys.fields() for part in key.split(".")})
names = st.sampled_from(KEYS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**30)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    | st.sampled_from(["auto", "tpu", "named", "gs://x", "bytes", "query"])
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=6), max_leaves=12
)


@settings(max_examples=150, deadline=None, database=None)
@example({"model": "x", "data": "y"}, ["device=[]"])
@example({"model": {"name": None}, "data": {"path": "y"}, "device": ["auto", 1]}, ["model.rope_scaling.low.x=1"])
@example({"model": "x", "data": {"path": "\0"}}, ["steps=1", "epochs=1"])
@given(
    st.dictionaries(names, trees, max_size=6),
    st.lists(st.builds("{}={}".format, st.lists(names, min_size=1, max_size=3).map(".".join), scalars), max_size=3),
)
def test_anything_is_a_job_or_a_users_mistake(tree: dict[str, Any], overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        for words in ([], ["model=m", "data=d"], overrides):
            outcome = _job_or_mistake(file, words)
            if isinstance(outcome, UserError):
                assert outcome.what and outcome.why and outcome.fix  # noqa: PT018
                continue
            text = dump(outcome)
            if ".nan" not in text:  # your own model's options may hold one; it equals nothing
                again = Path(folder, "again.yaml")
                again.write_text(text, encoding="utf-8")
                assert load(again).job == outcome


def _job_or_mistake(file: Path, overrides: list[str]) -> Job | UserError:
    try:
        return load(file, overrides).job
    except UserError as error:
        return error
