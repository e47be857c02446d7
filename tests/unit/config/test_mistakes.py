from __future__ import annotations

from pathlib import Path

import pytest

from forerun.config import aliases, keys
from forerun.config.load import load
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
    assert str(error) == (
        "error: unknown key 'optimzer'\n"
        "  why: job.yaml:4 has it, but a job has no 'optimzer'\n"
        "  fix: did you mean 'optimizer'?"
    )


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
    assert error.what == f"unknown key '{key}'"
    assert error.why.startswith(f"job.yaml:{line} ")
    assert error.fix == f"did you mean '{meant}'?"


def test_an_unknown_key_like_nothing_lists_what_is_known() -> None:
    error = error_of(SMALL + "checkpoint:\n  zzz: 1\n")
    assert error.fix == "remove it; known here: every, folder, keep, keep_every, keep_best"


def test_an_unknown_key_deep_in_the_model() -> None:
    error = error_of("model:\n  name: x\n  rope_scaling:\n    factr: 3\ndata: y\n")
    assert error.why.startswith("job.yaml:4 ")
    assert error.fix == "did you mean 'model.rope_scaling.factor'?"


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("steps: many", "steps: 'many' is not a whole number", "write a whole number"),
        ("batch: 1e3", "batch: 1000.0 is not a whole number", "write batch: 1000"),
        ("batch: 1.5", "batch: 1.5 is not a whole number", "write for example batch: 32"),
        ("batch: 0", "batch: 0 is not greater than 0", "write for example batch: 32"),
        ("batch: true", "batch: true is not a whole number", "write for example batch: 32"),
        ("batch: '32'", "batch: '32' is not a whole number", "write for example batch: 32"),
        ("epochs: long", "epochs: 'long' is not a number", "write a number"),
        ("name: 12", "name: 12 is not text", 'put it in quotes: name: "12"'),
        ("name: null", "name: null is not text", "write for example name: job"),
        ("mesh: 4", "mesh: 4 is not a section of keys", "remove it, or write keys below it: data, fsdp, tp"),
        ("attention: flash", "attention: 'flash' is not one of auto, splash, cudnn, xla", "did you mean 'splash'?"),
        (
            "attention: 3",
            "attention: 3 is not one of auto, splash, cudnn, xla",
            "write one of auto, splash, cudnn, xla",
        ),
        ("device: tpuu", "device: 'tpuu' is not one of auto, tpu, gpu, cpu or a list", "did you mean 'tpu'?"),
        ("device: [tpu, cpuu]", "device.1: 'cpuu' is not one of tpu, gpu, cpu", "did you mean 'cpu'?"),
    ],
)
def test_wrong_values_in_plain_words(line: str, what: str, fix: str) -> None:
    error = error_of(SMALL + line + "\n")
    assert (error.what, error.fix) == (what, fix)
    assert error.why.startswith("job.yaml:3 sets ")


def test_wrong_values_on_the_command_line() -> None:
    error = error_of(SMALL, "optimizer.lr=fast")
    assert str(error) == (
        "error: optimizer.lr: 'fast' is not a number\n"
        "  why: command line sets optimizer.lr (peak learning rate)\n"
        "  fix: write for example optimizer.lr=0.0003"
    )
    assert error_of(SMALL, "name=12").fix == "put it in quotes: name='\"12\"'"
    assert error_of(SMALL, "model.tied=yes").what == "model.tied: 'yes' is not true or false"
    assert error_of(SMALL, "optimizer.clip=.nan").what == "optimizer.clip: .nan is not a finite number"
    assert error_of(SMALL, "remat.keep=query").what == "remat.keep: 'query' is not a list"
    assert error_of(SMALL, "device=[]").what.endswith("or a list with an entry")


def test_words_that_are_no_overrides() -> None:
    for word in ("x", "=3", "a..b=3", ".a=3", "--x"):
        assert error_of(SMALL, word).what == f"'{word}' is not an override"
    error = error_of(SMALL + "steps: 4\n", "steps.x=2")
    assert error.what == "unknown key 'steps.x'"
    assert error.fix == "write steps=2"
    error = error_of(SMALL, "name=a: b: c")
    assert error.what == "this is not valid YAML"
    assert "command line: name=a: b: c" in error.why
    assert "quotes" in error.fix


def test_validators_speak_for_themselves() -> None:
    error = error_of(SMALL + "steps: 3\nepochs: 2\n")
    assert error.what == "steps and epochs are both given: keep one"
    assert error.why == "job.yaml:3 sets steps, job.yaml:4 sets epochs"
    error = error_of(SMALL + "remat:\n  policy: named\n  keep: [zz]\n")
    assert error.what.startswith("unknown residual 'zz'; known: layer_in")
    assert error.why == "job.yaml:3 sets remat"


def test_what_is_missing() -> None:
    error = error_of("data: x\n")
    assert error.what == "'model' is missing"
    assert error.fix == "add it, for example: model: Qwen/Qwen3-0.6B"
    error = error_of("model: x\ndata:\n  tokenizer: bytes\n")
    assert error.what.startswith("data.path is missing: a file, a folder or a glob")
    assert error.why == "job.yaml:2 sets data"


def test_a_misspelt_key_is_not_also_missing() -> None:
    assert error_of("modle: x\ndata: y\n").what == "unknown key 'modle'"
    assert error_of("model: x\ndata:\n  pth: y\n").what == "unknown key 'data.pth'"


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    error = error_of(SMALL + "zzz: 1\nbatch: many\noptimizer:\n  lr: fast\n  bb1: 1\n", "seed=x")
    assert error.what == "5 mistakes in the job"
    places = [line.split(": ")[0] for line in error.why.split("\n")]
    assert places == ["job.yaml:3", "job.yaml:4", "job.yaml:6", "job.yaml:7", "command line"]
    assert "job.yaml:7: unknown key 'optimizer.bb1'; did you mean 'optimizer.b1'?" in error.why
    assert error.fix == "fix them, then run: forerun check job.yaml"


def test_a_file_given_by_its_path_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "job.yaml"
    file.parent.mkdir()
    file.write_text(SMALL + "zzz: 1\n")
    with pytest.raises(UserError) as caught:
        load(file)
    assert caught.value.why.startswith(f"{file}:3 ")


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        (f"batch: {10**8}", "batch: 100000000 is not at most 1e+07", "write for example batch: 32"),
        (f"steps: {10**30}", f"steps: {10**30} is not at most 1e+15", "write a number that is at most 1e+15"),
        ("micro_batch: 0", "micro_batch: 0 is not greater than 0", "write a number that is greater than 0"),
        ("epochs: 1e300", "epochs: 1.0e+300 is not at most 1e+06", "write a number that is at most 1e+06"),
        (f"seed: {2**32}", f"seed: {2**32} is not less than 4.29497e+09", "write for example seed: 0"),
    ],
)
def test_numbers_beyond_any_use(line: str, what: str, fix: str) -> None:
    error = error_of(f"{SMALL}{line}\n")
    assert (error.what, error.fix) == (what, fix)


@pytest.mark.parametrize("name", [":Net", "net:", ".net:Net", "a b:Net", "net:Net:Net"])
def test_a_class_is_named_by_its_module_and_its_name(name: str) -> None:
    error = error_of(f"model: '{name}'\ndata: texts\n")
    assert error.what == f"model.name: {name!r} is not module.path:Class; write for example my_model:Net"
    assert error.why.startswith("job.yaml:1 ")
    assert error.fix == "change model.name"


def test_every_alias_names_a_key_that_exists_and_hides_none() -> None:
    assert set(aliases.KEYS.values()) <= set(keys.fields())
    ends = {key.rpartition(".")[2] for key in keys.fields()}
    assert set(aliases.KEYS) & ends <= {"dtype"}
    for key, values in aliases.VALUES.items():
        assert key in keys.fields()
        assert all(alias not in values.values() for alias in values)


def test_a_missing_section_that_was_meant_is_told_once() -> None:
    error = error_of("model: qwen3-0.6b\ndataset: texts\n")
    assert (error.what, error.fix) == ("unknown key 'dataset'", "did you mean 'data.path'?")


@pytest.mark.parametrize(("device", "meant"), [("cuda", "gpu"), ("CUDA", "gpu"), ("rocm", "gpu"), ("tpus", "tpu")])
def test_a_device_by_another_name(device: str, meant: str) -> None:
    assert error_of(SMALL, f"device={device}").fix == f"did you mean '{meant}'?"


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
