"""`forerun convert`: configurations of axolotl, TRL and transformers become jobs, and nothing is dropped silently."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_assertions import assert_error

import forerun as fr
from forerun.cli.main import main
from forerun.config.load import load
from forerun.config.schema import Job

# The keys are those of examples in axolotl's repository; the files are written for these tests.
QLORA = """
base_model: NousResearch/Meta-Llama-3-8B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/qlora-out
adapter: qlora
lora_model_dir:
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
my_own_key: 3
"""
DPO = """
base_model: Qwen/Qwen3-0.6B
chat_template: chatml
rl: dpo
datasets:
  - path: argilla/ultrafeedback
    type: chat_template.default
    field_messages: conversation
    field_chosen: chosen_answer
    field_rejected: rejected
    message_property_mappings: {role: role, content: content}
rl_beta: 0.2
sequence_len: 2048
micro_batch_size: 1
max_steps: 100
num_epochs: 3
learning_rate: 5e-7
optimizer: adamw_torch
bf16: true
"""
FULL = """
base_model: Qwen/Qwen2.5-0.5B
adapter:
lora_r: 32
lora_alpha: 16
datasets:
  - {path: mlabonne/FineTome-100k, type: chat_template, split: "train[:20%]", field_messages: conversations,
     message_property_mappings: {role: from, content: value}}
  - {path: json, data_files: [local/notes.jsonl], type: completion, field: body}
micro_batch_size: 4
dp_shard_size: 8
learning_rate: 1e-5
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
warmup_steps: 100
save_steps: 200
save_total_limit: 3
use_tensorboard: true
fsdp_config: {fsdp_version: 2, offload_params: false}
"""
TRL_FILE = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
eos_token: <|im_end|>
use_peft: true
lora_r: 32
lora_target_modules: [q_proj, v_proj]
report_to: [none]
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def converted(text: str, name: str = "config.yml", **options: Any) -> fr.ConvertedJob:
    """Convert a text, load the result as a job file, and check that every key of the text is accounted for."""
    Path(name).write_text(text)
    found = fr.convert(name, **options)
    Path("job.yaml").write_text(found.text)
    loaded = load("job.yaml").job
    assert found.job is not None
    assert loaded.model_dump(exclude={"name", "data", "lora", "runs"}) == found.job.model_dump(
        exclude={"name", "data", "lora", "runs"}
    )
    for key in yaml.safe_load(text):
        assert re.search(rf"#.*\b{key}\b", found.text), f"{key} was dropped"
    return found


def job_of(found: fr.ConvertedJob) -> Job:
    assert found.job is not None
    return found.job


def test_a_qlora_file_of_axolotl() -> None:
    found = converted(QLORA, devices=2)
    job = job_of(found)
    assert found.source == "axolotl"
    assert (job.batch, job.micro_batch, job.sequence, job.epochs) == (16, 2, 4096, 4)
    assert job.model.name == "NousResearch/Meta-Llama-3-8B"
    assert job.data.path == "hf://datasets/tatsu-lab/alpaca"
    assert (job.data.validation, job.data.packing) == (0.05, "whole")
    assert job.lora is not None
    assert (job.lora.rank, job.lora.alpha, job.lora.dropout, job.lora.base) == (32, 16.0, 0.05, "nf4")
    assert (job.optimizer.lr, job.optimizer.warmup, job.optimizer.weight_decay) == (2e-4, 0.1, 0.0)
    assert (job.optimizer.b2, job.optimizer.final_lr) == (0.999, 0.0), "the defaults of axolotl"
    assert (job.name, job.runs, job.remat.policy) == ("qlora-out", "./outputs", "full")
    assert set(found.not_converted) == {"evals_per_epoch", "saves_per_epoch", "my_own_key"}
    assert {"tf32", "attn_implementation", "special_tokens", "optimizer"} <= set(found.unneeded)
    assert found.assumed == []


def test_preferences_of_axolotl() -> None:
    job = job_of(converted(DPO))
    assert job.preferences is not None
    assert (job.preferences.loss, job.preferences.beta) == ("dpo", 0.2)
    assert job.data.columns == {"prompt": "conversation", "chosen": "chosen_answer"}
    assert (job.steps, job.epochs) == (100, None), "steps take precedence"
    assert job.data.chat_template == "chatml"


def test_several_datasets_and_no_adapter() -> None:
    found = converted(FULL, devices=8)
    job = job_of(found)
    assert job.lora is None, "without an adapter, the lora keys have no effect"
    assert {name: part.path for name, part in job.data.mixture.items()} == {
        "FineTome-100k": "hf://datasets/mlabonne/FineTome-100k",
        "notes-jsonl": "local/notes.jsonl",
    }
    assert job.data.mixture["FineTome-100k"].columns == {"messages": "conversations"}
    assert job.data.mixture["notes-jsonl"].columns == {"text": "body"}
    assert "train[:20%]" in found.not_converted["datasets"]
    assert (job.batch, job.mesh.fsdp, job.optimizer.final_lr, job.optimizer.warmup) == (32, 8, 0.1, 100)
    assert (job.checkpoint.every, job.checkpoint.keep, job.track.to) == (200, 3, ("tensorboard",))


def test_the_trackers_of_several_keys() -> None:
    text = "base_model: a/b\ndatasets: [{path: a/c}]\nmicro_batch_size: 2\nuse_tensorboard: true\nuse_mlflow: false\n"
    text += "wandb_project: letters\nwandb_entity: team\nwandb_name: first\nwandb_mode: offline\nuse_comet: true\n"
    found = converted(text)
    job = job_of(found)
    assert (job.track.to, job.track.project, job.track.entity) == (("tensorboard", "wandb"), "letters", "team")
    assert job.name == "first"
    assert set(found.not_converted) == {"use_comet"}
    assert "WANDB_MODE=offline" in found.unneeded["wandb_mode"]


def test_a_file_of_the_trl_command_line() -> None:
    found = converted(TRL_FILE, devices=4)
    job = job_of(found)
    assert found.source == "TRL"
    assert (job.batch, job.micro_batch, job.epochs, job.optimizer.schedule) == (64, 2, 1, "linear")
    assert job.lora is not None
    assert job.lora.targets == ("q_proj", "v_proj")
    assert "eos_token" in found.not_converted


def test_devices_of_the_file_and_an_assumed_one() -> None:
    text = "base_model: a/b\ndatasets: [{path: a/c}]\nmicro_batch_size: 2\n"
    assert job_of(converted(text)).batch == 2
    assert "1 device" in converted(text).assumed[0]
    found = converted(text + "num_processes: 4\n")
    assert (job_of(found).batch, job_of(found).devices) == (8, 4)


def test_values_that_a_job_rejects_are_listed() -> None:
    found = converted("base_model: a/b\ndatasets: [{path: a/c}]\nlearning_rate: -1\nearly_stopping_patience: 3\n")
    assert set(found.not_converted) == {"learning_rate", "early_stopping_patience"}
    assert "data.validation" in found.not_converted["early_stopping_patience"]


def test_secrets_are_not_repeated() -> None:
    found = converted("base_model: a/b\nmicro_batch_size: 2\nhub_token: hf_abc\nother_token: hf_def\n")
    assert "hf_abc" not in found.text + str(found)
    assert "hf_def" not in found.text + str(found)


def test_the_command_prints_the_job_and_the_rest_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Path("axolotl.yml").write_text(QLORA)
    assert main(["convert", "axolotl.yml", "--devices", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out == fr.convert("axolotl.yml", devices=2).text
    assert "not converted: my_own_key" in printed.err
    assert "not converted" not in printed.out.split("# Not converted")[0]


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.json", "{", "E-COMMAND-080"),
        ("a.json", "[]", "E-COMMAND-081"),
        ("a.yml", "x: 1\n", "E-COMMAND-081"),
        ("a.yml", "model: qwen3-0.6b\ndata: texts\nsteps: 10\nepochs: null\n", "E-COMMAND-081"),
        ("a.yml", "base_model: a/b\nrl: grpo\nmicro_batch_size: 1\n", "E-COMMAND-082"),
        ("a.yml", "base_model: a/b\nadapter: ia3\nmicro_batch_size: 1\n", "E-COMMAND-082"),
        ("a.json", '{"num_generations": 8, "learning_rate": 1e-6, "beta": 0.04}', "E-COMMAND-082"),
    ],
)
def test_files_that_cannot_become_a_job(name: str, text: str, code: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(fr.UserError) as caught:
        fr.convert(name)
    assert_error(caught.value, code, what=name)


def test_devices_are_positive() -> None:
    with pytest.raises(fr.UserError) as caught:
        fr.convert("a.yml", devices=0)
    assert_error(caught.value, "E-COMMAND-084", what="0")


@pytest.mark.torch
def test_the_arguments_of_the_installed_trainer() -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir="out/run", per_device_train_batch_size=4, gradient_accumulation_steps=8, learning_rate=1e-4,
        lr_scheduler_type="cosine", warmup_steps=10, num_train_epochs=2, bf16=True, save_steps=50, save_total_limit=3,
        logging_steps=5, report_to="none", gradient_checkpointing=True, max_grad_norm=0.5, use_cpu=True,
    )  # fmt: skip
    text = arguments.to_json_string()
    found = converted(text, "training_args.json", devices=2, model="Qwen/Qwen3-0.6B", data="rows.jsonl")
    job = job_of(found)
    assert found.source == "transformers"
    assert (job.batch, job.micro_batch, job.epochs, job.device) == (64, 4, 2, "cpu")
    assert (job.optimizer.lr, job.optimizer.schedule, job.optimizer.warmup) == (1e-4, "cosine", 10)
    assert (job.optimizer.b1, job.optimizer.b2, job.optimizer.eps) == (0.9, 0.999, 1e-8)
    assert (job.optimizer.clip, job.optimizer.weight_decay) == (0.5, 0.0)
    assert (job.checkpoint.every, job.checkpoint.keep, job.log_every, job.seed) == (50, 3, 5, 42)
    assert (job.precision.compute, job.remat.policy, job.name, job.runs) == ("bfloat16", "full", "run", "out")
    # Every field of this version of transformers is known: nothing of a plain configuration is lost.
    assert found.not_converted == {}
    assert set(json.loads(text)) >= set(found.unneeded)


def test_a_placeholder_for_what_the_arguments_do_not_say() -> None:
    found = converted('{"learning_rate": 1e-5, "per_device_train_batch_size": 4}', "training_args.json")
    assert (job_of(found).model.name, job_of(found).data.path) == ("owner/model", "path/of/data")
    assert [text.partition(":")[0] for text in found.assumed[1:]] == ["model", "data"]


def test_the_arguments_of_dpo() -> None:
    found = converted(
        '{"learning_rate": 1e-6, "beta": 0.3, "loss_type": ["sigmoid"], "label_smoothing": 0.2, "max_length": 512}',
        "dpo.json",
    )
    preferences = job_of(found).preferences
    assert found.source == "TRL (DPO)"
    assert preferences is not None
    assert (preferences.loss, preferences.smoothing, preferences.beta) == ("cdpo", 0.2, 0.3)


def test_the_warm_up_that_axolotl_has_without_a_key() -> None:
    """`_configure_warmup_and_logging` of axolotl 0.18.0 warms up for 3 % of the steps; the Trainer for none."""
    assert job_of(converted("base_model: a/b\ndatasets: [{path: t.txt}]\nlearning_rate: 1e-4")).optimizer.warmup == 0.03
    trainer = converted("output_dir: out\nlearning_rate: 1e-4", model="a/b", data="t.txt")
    assert job_of(trainer).optimizer.warmup == 0


def test_a_loss_of_dpo_is_not_dropped_because_its_value_is_the_default_of_another_key() -> None:
    text = "model_name_or_path: a/b\ndataset_name: t.jsonl\nloss_type: sigmoid\nbeta: 0.1\n"
    assert "ld_alpha" in converted(f"{text}ld_alpha: 0.5").not_converted
    assert "f_alpha_divergence_coef" in converted(f"{text}f_alpha_divergence_coef: 0.5").unneeded
