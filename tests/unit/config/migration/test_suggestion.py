"""Keys of other trainers in a job: the error names our key with the converted value, and that value is accepted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from error_assertions import assert_error

from forerun.cli.main import main
from forerun.config import keys
from forerun.config.keys import shorthands
from forerun.config.load import load
from forerun.config.migration.conversion import ForeignValues
from forerun.config.migration.registry import GROUPS, convert_value, names
from forerun.config.migration.suggestion import overrides
from forerun.config.source import flow, read_value
from forerun.errors import UserError

SMALL = "model: {name: qwen3-0.6b}\ndata: {path: texts, validation: 0.1}\n"
NAMES = [(name, key) for group in GROUPS.values() for key in group for name in key.names.split()]
# Conversions to keys that some versions do not have.
OPTIONAL = {"optimizer.name", "model.new_tokens", "data.system", "data.limit", "data.prefetch"}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(SMALL)


def error_of(text: str, *words: str) -> UserError:
    Path("job.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load("job.yaml", words)
    return caught.value


def test_the_table_has_the_names_of_six_trainers() -> None:
    assert len(names()) == len(NAMES) >= 90, "a name is in two rows"
    converted = {name for name, key in NAMES if key.key}
    wanted = """save_steps per_device_train_batch_size gradient_accumulation_steps report_to device_type nprocs
    global_batch_size use_gradient_checkpointing grad_clip_norm num_train_epochs learning_rate bf16 fp16
    lr_scheduler_type warmup_ratio max_seq_length base_model micro_batch_size sequence_len adapter lora_r lora_alpha
    lora_target_modules ici_fsdp_parallelism per_device_batch_size max_target_length dataset_path hf_path"""
    assert set(wanted.split()) <= converted
    assert "xmp.spawn" in names()
    assert {key.key for _, key in NAMES} - {""} - OPTIONAL <= set(keys.fields())


@pytest.mark.parametrize("group", GROUPS)
def test_the_suggestion_for_each_name_is_accepted(group: str) -> None:
    """Applied to a job, the settings load, and the job has the value that the conversion promises."""
    for key in GROUPS[group]:
        for name in key.names.split():
            found = convert_value(name, key.example, ForeignValues({name: key.example}))
            assert found is not None, name
            assert found.note or found.settings, name
            loaded = load("job.yaml", [f"{one}={flow(value)}" for one, value in found.settings.items()])
            changed = {one for one, origin in loaded.origins.items() if origin.kind == "override"}
            assert changed == set(found.settings), name


def lines_in(fix: str) -> list[str]:
    """The lines of a job, or the overrides, that a fix tells to write. A note after them has no quotes."""
    found = re.findall(r"`[^`]+`|'[^']+'", fix.partition("write ")[2].partition("; ")[0])
    return [line[1:-1] for line in found]


def merged(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for name, value in other.items():
        tree[name] = (
            merged(tree[name], value) if isinstance(value, dict) and isinstance(tree.get(name), dict) else value
        )
    return tree


@pytest.mark.parametrize("group", [name for name in GROUPS if not name.startswith("Not ")])
def test_the_text_of_the_error_can_be_copied(group: str) -> None:
    """What the error tells to write, in a file and on the command line, makes the same job."""
    copied = 0
    for key in GROUPS[group]:
        name = key.names.split()[0]
        if name in keys.siblings("") or isinstance(key.example, dict | list) or "." in name:
            continue
        words = lines_in(error_of(SMALL, f"{name}={flow(key.example)}").fix)
        lines = lines_in(error_of(f"{SMALL}{name}: {flow(key.example)}\n").fix)
        assert len(words) >= len(lines), name
        tree = read_value(SMALL, "")
        for line in lines:
            section = read_value(line, "")
            section = {name: {shorthands()[name]: value} if isinstance(value, str) and name in shorthands() else value
                       for name, value in section.items()}  # fmt: skip
            merged(tree, section)
        Path("job.yaml").write_text(SMALL)
        from_words = load("job.yaml", words).job
        Path("job.yaml").write_text(flow(tree))
        assert load("job.yaml").job == from_words, name
        copied += bool(lines)
    assert copied > 0


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\n", ["batch: 32", "micro_batch: 4"]),
        ("devices: 2\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 8\n",
         ["batch: 64", "micro_batch: 4"]),
        ("micro_batch_size: 2\nnum_processes: 4\n", ["batch: 8", "micro_batch: 2"]),
        ("batch: 64\ngradient_accumulation_steps: 8\n", ["micro_batch: 8"]),
        ("global_batch_size: 768\n", ["batch: 768"]),
        ("train_batch_size: 64\nper_device_parallelism: 4\ndevices: 8\n", ["batch: 64", "micro_batch: 4"]),
        ("batch_size: 4\naccumulation_steps: 8\nnum_chips: 4\n", ["batch: 128", "micro_batch: 4"]),
        ("device_type: cuda\n", ["device: gpu"]),
        ("use_gradient_checkpointing: true\n", ["remat: full"]),
        ("grad_clip_norm: 1.0\n", ["optimizer: {clip: 1.0}"]),
        ("max_grad_norm: 0\n", ["optimizer: {clip: null}"]),
        ("fp16: true\n", ["precision: {compute: bfloat16}"]),
        ("min_lr: 1e-5\nlearning_rate: 1e-4\n", ["optimizer: {final_lr: 0.1}"]),
        ("adapter: qlora\nlora_r: 32\n", ["lora: {base: nf4, rank: 32}"]),
        ("dataset_name: trl-lib/Capybara\n", ["data: hf://datasets/trl-lib/Capybara"]),
        ("loss_type: sigmoid\nlabel_smoothing: 0.1\n", ["preferences: {loss: cdpo, smoothing: 0.1}"]),
        ("mp: p=f32,c=bfloat16\n", ["precision: {compute: bfloat16, params: float32}"]),
        ("training: {seq_len: 2048, steps: 100, local_batch_size: 2}\n",
         ["sequence: 2048", "steps: 100", "batch: 2", "micro_batch: 2"]),
        ("activation_checkpoint: {mode: selective}\n", ["remat: dots"]),
        ("xmp: {spawn: {nprocs: 8}}\n", ["devices: 8"]),
        ("checkpoint: {interval: 500}\n", ["checkpoint: {every: 500}"]),
        ("output_dir: ./outputs/lora-out\n", ["name: lora-out", "runs: ./outputs"]),
        ("report_to: [tensorboard, mlflow]\n", ["track: {to: [tensorboard, mlflow]}"]),
        ("report_to: wandb\nrun_name: first\n", ["track: {to: [wandb]}", "name: first"]),
        ("report_to: trackio\nproject: letters\n", ["track: {to: [trackio]}", "track: {project: letters}"]),
    ],
)  # fmt: skip
def test_values_are_converted(text: str, lines: list[str]) -> None:
    error = error_of(SMALL + text)
    written = [line for part in (error.fix, *error.why.split("\n")) if "write " in part for line in lines_in(part)]
    assert set(lines) <= set(written), str(error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dataloader_num_workers: 0\n", "thread"),
        ("mark_step: true\n", "compiled"),
        ("xmp: {spawn: 8}\n", "one process"),
        ("save_strategy: epoch\n", "checkpoint.every"),
        ("report_to: carrier_pigeon\n", "track.to"),
        ("learning_rate:\n", "remove it"),
        ("val_set_size: 1\n", "number of rows"),
    ],
)
def test_keys_without_a_value_here_say_why(text: str, reason: str) -> None:
    assert_error(error_of(SMALL + text), "E-JOB-018", fix=reason)


def test_an_accumulation_that_does_not_divide_the_batch_over_the_devices_has_no_micro_batch() -> None:
    error = error_of(f"{SMALL}batch: 32\ngradient_accumulation_steps: 4\ndevices: 3\n")
    assert_error(error, "E-JOB-018", fix="4 x 3")
    assert not [line for line in lines_in(error.fix) if line.startswith("micro_batch")]


def test_a_key_of_a_job_in_the_wrong_section_is_not_one_of_another_trainer() -> None:
    assert_error(error_of(SMALL + "fsdp: 8\n"), "E-JOB-018", fix="'mesh.fsdp'")


def test_a_file_for_another_trainer_names_the_command_that_converts_it() -> None:
    error = error_of("base_model: a/b\nmicro_batch_size: 2\nlora_r: 8\nsequence_len: 128\ndatasets: [{path: a/c}]\n")
    assert_error(error, "E-JOB-004", what="5 ", fix="forerun convert job.yaml")
    assert "'model' is missing" not in error.why
    words = ["save_steps=5", "lora_r=8", "warmup_ratio=0.1", "max_grad_norm=1"]
    assert "forerun convert" not in error_of(SMALL, *words).fix


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--learning-rate", "3e-4"], "optimizer.lr=3e-4"),
        (["--per-device-train-batch-size=4"], "batch=4 micro_batch=4"),
        (["--bf16"], "precision.compute=bfloat16"),
        (["--use-cpu"], "device=cpu"),
        (["--report-to", "tensorboard"], "track.to=[tensorboard]"),
    ],
)
def test_options_of_other_trainers(words: list[str], fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "job.yaml", *words]) == 2
    assert fix in capsys.readouterr().err


def test_an_unknown_option_has_no_overrides() -> None:
    values: list[Any] = [overrides("nonsense", "3"), overrides("mark_step", "")]
    assert values == [None, None]
