from __future__ import annotations

import re
from pathlib import Path

import pytest
from error_assertions import assert_error

from forerun.config import keys
from forerun.config.load import load
from forerun.config.migration.values import ALIASES
from forerun.config.mistakes import REMOVED
from forerun.error_catalog import CODE
from forerun.errors import UserError

SMALL = "model: qwen3-0.6b\ndata: texts\n"


def error_of(text: str, *overrides: str) -> UserError:
    Path("job.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load("job.yaml", overrides)
    return caught.value


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_unknown_section() -> None:
    error = error_of(SMALL + "\noptimzer:\n  lr: 1e-3\n")
    assert_error(error, "E-JOB-018", what="'optimzer'", why="job.yaml:4 ", fix="'optimizer'")


@pytest.mark.parametrize(
    ("text", "line", "key", "meant"),
    [
        ("optimizer:\n  lrr: 1\n", 4, "optimizer.lrr", "optimizer.lr"),
        ("lr: 1\n", 3, "lr", "optimizer.lr"),
        ("weight_decay: 0\n", 3, "weight_decay", "optimizer.weight_decay"),
        ("optimizer:\n  batch: 3\n", 4, "optimizer.batch", "batch"),
        ("batch_size: 3\n", 3, "batch_size", "batch"),
        ("mesh: {fdsp: 3}\n", 3, "mesh.fdsp", "mesh.fsdp"),
        ("learning_rate: 1e-4\n", 3, "learning_rate", "optimizer.lr"),
        ("optimizer:\n  learning_rate: 1e-4\n", 4, "optimizer.learning_rate", "optimizer.lr"),
        ("max_seq_length: 128\n", 3, "max_seq_length", "sequence"),
        ("optimizer: {max_grad_norm: 1}\n", 3, "optimizer.max_grad_norm", "optimizer.clip"),
    ],
)
def test_unknown_keys_say_what_was_meant(text: str, line: int, key: str, meant: str) -> None:
    error = error_of(SMALL + text)
    assert_error(error, "E-JOB-018", what=f"'{key}'", why=f"job.yaml:{line} ", fix=f"'{meant}'")


def test_an_unknown_key_like_nothing_lists_what_is_known() -> None:
    error = error_of(SMALL + "checkpoint:\n  zzz: 1\n")
    assert_error(error, "E-JOB-018", what="'checkpoint.zzz'", fix="every, folder, keep, keep_every, keep_best")


@pytest.mark.parametrize("override", ["", "data.begin=early"])
def test_a_removed_key_names_the_change(override: str) -> None:
    text = SMALL if override else "model: qwen3-0.6b\ndata:\n  path: texts\n  begin: early\n"
    origin = "command line" if override else "job.yaml:4"
    error = error_of(text, *filter(None, [override]))
    assert_error(
        error, "E-JOB-018", what="'data.begin'", why=f"{origin} has it, but it was removed: {REMOVED['data.begin']}"
    )
    assert set(REMOVED) & set(keys.leaf_keys()) == set()


def test_an_unknown_key_deep_in_the_model() -> None:
    error = error_of("model:\n  name: x\n  rope_scaling:\n    factr: 3\ndata: y\n")
    assert_error(error, "E-JOB-018", why="job.yaml:4 ", fix="'model.rope_scaling.factor'")


@pytest.mark.parametrize(
    ("line", "code", "key", "value", "fix"),
    [
        ("steps: many", "E-JOB-020", "steps", "'many'", ""),
        ("batch: 1e3", "E-JOB-020", "batch", "1000.0", "batch: 1000"),
        ("batch: 1.5", "E-JOB-020", "batch", "1.5", "batch: 32"),
        ("batch: 0", "E-JOB-020", "batch", "0", "batch: 32"),
        ("batch: true", "E-JOB-020", "batch", "true", "batch: 32"),
        ("batch: '32'", "E-JOB-020", "batch", "'32'", "batch: 32"),
        ("epochs: long", "E-JOB-020", "epochs", "'long'", ""),
        ("name: 12", "E-JOB-020", "name", "12", 'name: "12"'),
        ("name: null", "E-JOB-020", "name", "null", "name: job"),
        ("mesh: 4", "E-JOB-020", "mesh", "4", "data, fsdp, tp"),
        ("attention: flash", "E-JOB-020", "attention", "'flash'", "'splash'"),
        ("attention: 3", "E-JOB-020", "attention", "3", "auto, splash, cudnn, xla"),
        ("precision: {compute: float16}", "E-JOB-020", "precision.compute", "'float16'", "bfloat16"),
        ("device: tpuu", "E-JOB-020", "device", "'tpuu'", "'tpu'"),
        ("device: [tpu, cpuu]", "E-JOB-020", "device.1", "'cpuu'", "'cpu'"),
    ],
)
def test_wrong_values_in_plain_words(line: str, code: str, key: str, value: str, fix: str) -> None:
    error = error_of(SMALL + line + "\n")
    assert_error(error, code, what=f"{key}: {value} ", why="job.yaml:3 ", fix=fix)


@pytest.mark.parametrize(
    ("override", "value", "fix"),
    [
        ("optimizer.lr=fast", "'fast'", "optimizer.lr=0.0003"),
        ("name=12", "12", "name='\"12\"'"),
        ("model.tied=yes", "'yes'", ""),
        ("optimizer.clip=.nan", ".nan", ""),
        ("remat.keep=query", "'query'", ""),
        ("device=[]", "[]", ""),
    ],
)
def test_wrong_values_on_the_command_line(override: str, value: str, fix: str) -> None:
    key = override.partition("=")[0]
    assert_error(
        error_of(SMALL, override), "E-JOB-020", what=f"{key}: {value} ", why=f"command line sets {key}", fix=fix
    )


def test_words_that_are_no_overrides() -> None:
    for word in ("x", "=3", "a..b=3", ".a=3", "--x"):
        assert_error(error_of(SMALL, word), "E-JOB-002", what=f"'{word}'")
    error = error_of(SMALL + "steps: 4\n", "steps.x=2")
    assert_error(error, "E-JOB-003", what="'steps.x'", fix="steps=2")
    error = error_of(SMALL, "name=a: b: c")
    assert_error(error, "E-JOB-016", why="command line: name=a: b: c")


def test_validators_speak_for_themselves() -> None:
    error = error_of(SMALL + "steps: 3\nepochs: 2\n")
    assert_error(error, "E-JOB-041", why="job.yaml:3 sets steps, job.yaml:4 sets epochs")
    error = error_of(SMALL + "remat:\n  policy: named\n  keep: [zz]\n")
    assert_error(error, "E-JOB-038", what="'zz'", why="job.yaml:3 sets remat")


def test_what_is_missing() -> None:
    error = error_of("data: x\n")
    assert_error(error, "E-JOB-019", what="'model'", fix="model: Qwen/Qwen3-0.6B")
    error = error_of("model: x\ndata:\n  tokenizer: bytes\n")
    assert_error(error, "E-JOB-026", what="data.path", why="job.yaml:2 sets data")


def test_a_misspelt_key_is_not_also_missing() -> None:
    assert_error(error_of("modle: x\ndata: y\n"), "E-JOB-018", what="'modle'")
    assert_error(error_of("model: x\ndata:\n  pth: y\n"), "E-JOB-018", what="'data.pth'")


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    error = error_of(SMALL + "zzz: 1\nbatch: many\noptimizer:\n  lr: fast\n  bb1: 1\n", "seed=x")
    assert_error(error, "E-JOB-004", what="5 ", fix="forerun check job.yaml")
    places = [line.split(": ")[0] for line in error.why.split("\n")]
    assert places == ["job.yaml:3", "job.yaml:4", "job.yaml:6", "job.yaml:7", "command line"]
    assert re.findall(CODE, error.why) == ["E-JOB-018", "E-JOB-020", "E-JOB-020", "E-JOB-018", "E-JOB-020"]
    assert "'optimizer.b1'" in error.why.split("\n")[3]


def test_a_file_given_by_its_path_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "job.yaml"
    file.parent.mkdir()
    file.write_text(SMALL + "zzz: 1\n")
    with pytest.raises(UserError) as caught:
        load(file)
    assert caught.value.why.startswith(f"{file}:3 ")


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        (f"batch: {10**8}", "1e+07"),
        (f"steps: {10**30}", "1e+15"),
        ("micro_batch: 0", "0"),
        ("epochs: 1e300", "1e+06"),
        (f"seed: {2**32}", "4.29497e+09"),
    ],
)
def test_numbers_beyond_any_use(line: str, limit: str) -> None:
    key, _, value = line.partition(": ")
    shown = "1.0e+300" if value == "1e300" else value
    assert_error(error_of(f"{SMALL}{line}\n"), "E-JOB-020", what=f"{key}: {shown} ", why="job.yaml:3 ")
    assert error_of(f"{SMALL}{line}\n").what.endswith(f" {limit}")


@pytest.mark.parametrize("name", [":Net", "net:", ".net:Net", "a b:Net", "net:Net:Net"])
def test_a_class_is_named_by_its_module_and_its_name(name: str) -> None:
    error = error_of(f"model: '{name}'\ndata: texts\n")
    assert_error(error, "E-JOB-036", what=f"model.name: {name!r} ", why="job.yaml:1 sets model.name")


def test_every_alias_of_a_value_belongs_to_a_key_and_hides_no_value() -> None:
    for key, values in ALIASES.items():
        assert key in keys.fields()
        assert all(value == alias for alias, value in values.items() if alias in values.values())


def test_a_missing_section_that_was_meant_is_told_once() -> None:
    error = error_of("model: qwen3-0.6b\ndataset: texts\n")
    assert_error(error, "E-JOB-018", what="'dataset'", fix="'data.path'")


@pytest.mark.parametrize(
    ("device", "meant"),
    [
        ("cuda", "gpu"),
        ("CUDA", "gpu"),
        ("cuda:0", "gpu"),
        ("[cuda,cpu]", "gpu"),
        ("rocm", "gpu"),
        ("xla", "tpu"),
        ("tpus", "tpu"),
    ],
)
def test_a_device_by_another_name(device: str, meant: str) -> None:
    assert_error(error_of(SMALL, f"device={device}"), "E-JOB-020", fix=f"'{meant}'")


@pytest.mark.parametrize(
    ("text", "overrides", "why"),
    [
        (
            "validation:\n  every: 10\n",
            ["validation.patience=2"],
            "command line sets validation.patience",
        ),
        ("validation:\n  patience: 10\n", ["validation.every=5"], "job.yaml:4 sets validation.patience"),
        ("steps: 3\n", ["epochs=2"], "job.yaml:3 sets steps, command line sets epochs"),
        ("epochs: 3\n", ["steps=2"], "command line sets steps, job.yaml:3 sets epochs"),
        (
            "lora: {rank: 4}\nqat:\n  weights: int4\n",
            ["qat.scales=learned"],
            "command line sets qat.scales, job.yaml:3 sets lora",
        ),
        (
            "remat:\n  policy: full\n",
            ["remat.keep=[query]"],
            "command line sets remat.keep, job.yaml:4 sets remat.policy",
        ),
    ],
)
def test_a_mistake_between_keys_names_the_place_of_each(text: str, overrides: list[str], why: str) -> None:
    """The section may be in the file, and the key that is wrong on the command line."""
    assert error_of(SMALL + text, *overrides).why == why


@pytest.mark.parametrize("text", ["", "# only a comment\n", "name: x\n"])
def test_an_empty_job_names_the_command_that_writes_one(text: str) -> None:
    assert "forerun init" in error_of(text).fix


def test_a_part_of_a_mixture_without_a_path() -> None:
    error = error_of("model: qwen3-0.6b\ndata:\n  mixture:\n    code: {weight: 2}\n")
    assert error.code == "E-JOB-019"
    assert "'data.mixture.code.path'" in error.what
    assert keys.meaning("data.mixture.code.path") in error.why
    assert keys.meaning("data.mixture.code.path") == "as data.path"


@pytest.mark.parametrize("columns", ["data.columns.txet=a", "data.columns.loss_mask=a"])
def test_an_unknown_role_of_a_column(columns: str) -> None:
    error = error_of(SMALL, columns)
    assert error.code == "E-JOB-025"
    assert "data.columns" in error.why
    assert "data.columns.columns" not in str(error)


def test_an_unknown_role_of_a_column_of_a_part() -> None:
    text = "model: qwen3-0.6b\ndata:\n  mixture:\n    code: {path: a, columns: {txet: b}}\n"
    assert error_of(text).code == "E-JOB-025"
