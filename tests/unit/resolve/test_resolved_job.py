"""The facts of a ResolvedJob, and that `plan` gets them without jax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from error_assertions import raises_error

from forerun.config.schema import Job, Model
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.methods.method import trainable_count
from forerun.models.decoder_config import DecoderConfig
from forerun.models.model_facts import ModelFacts, ModelOutline
from forerun.models.sizes import SIZES
from forerun.planner.compile.request import CompileRequest, from_json
from forerun.program.build import program_of
from forerun.program.kernels import job_attention
from forerun.resolve.job_corpus import with_steps
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.resolved_job import ResolvedJob

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 300,
}


def job(**values: Any) -> Job:
    return Job.model_validate({"model": "smollm2-135m", "data": "nothing", "steps": 9, "batch": 8, **values})


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    return str(tmp_path)


def test_facts_of_a_named_size() -> None:
    resolved = resolve_model(job())
    assert resolved.config == SIZES["smollm2-135m"]
    assert (resolved.steps, resolved.vocab, resolved.model_facts.heads) == (9, 49_152, 9)
    assert (resolved.model_facts.checkpoint, resolved.teacher, resolved.step_teacher) == (None, None, None)
    assert resolved.model_facts.family is not None
    assert resolved.model_facts.family.model_type == "llama"


def test_facts_of_a_checkpoint(checkpoint: str) -> None:
    resolved = resolve_model(job(model=checkpoint))
    assert isinstance(resolved.config, DecoderConfig)
    assert (resolved.config.layers, resolved.vocab, resolved.model_facts.heads) == (1, 300, 2)
    assert resolved.model_facts.snapshot is not None
    assert resolved.model_facts.snapshot.folder == Path(checkpoint)
    assert not resolved.model_facts.has_tokenizer


@pytest.mark.parametrize("cache", [None, "logits"])
def test_a_teacher_with_cached_logits_does_not_run_in_the_step(cache: str | None) -> None:
    resolved = resolve_model(job(distil={"teacher": "smollm2-360m", "cache": cache}))
    assert resolved.teacher is not None
    assert resolved.teacher.config == SIZES["smollm2-360m"]
    assert resolved.step_teacher == (resolved.teacher if cache is None else None)


def test_the_reason_of_the_steps_stays_when_they_are_filled_in(tmp_path: Path) -> None:
    """3,200 letters are 100 rows of 32 tokens, so 2 epochs in batches of 8 are 25 steps."""
    (tmp_path / "text.txt").write_text("x" * 3200, "utf-8")
    given = {"data": str(tmp_path / "text.txt"), "sequence": 32, "steps": None, "epochs": 2}
    resolved = with_steps(resolve_model(job(**given)))
    derived = resolved.derived(MeshShape(1, 1, 1), 100)
    assert (resolved.steps, resolved.job.epochs, derived.steps) == (25, None, 25)
    assert derived.reasons["steps"].startswith("2 epochs")
    assert resolve_model(job()).derived(MeshShape(1, 1, 1)).reasons["steps"] == "the job's"


def test_heads_are_checked_without_the_model_object() -> None:
    with raises_error("E-HARDWARE-009"):
        resolve_model(job()).derived(MeshShape(1, 1, 2))  # 9 heads


def test_program_has_the_facts_of_the_job() -> None:
    resolved = resolve_model(job(lora={"rank": 4}, sequence=32))
    program = program_of(resolved, MeshShape(1, 1, 1), jax.devices()[:1])
    assert sum(leaf.size for leaf in jax.tree.leaves(program.learning)) == trainable_count(resolved)
    device = jax.devices()[0]
    kernel = job_attention(resolved, resolved.model, device.platform, device.device_kind).kernel
    assert program.compute.attention == kernel
    assert program.derived == resolved.derived(MeshShape(1, 1, 1))
    assert program.model == resolved.model


def test_other_values_do_not_change_the_original() -> None:
    resolved = resolve_model(job())
    changed = resolved.with_values(micro_batch=2)
    assert (changed.job.micro_batch, resolved.job.micro_batch, changed.steps) == (2, None, 9)


@pytest.mark.parametrize("values", [{"tied": False}, {"qk_norm": False}, {"layers": 2}])
def test_no_dimension_of_a_checkpoint_can_be_changed(values: dict[str, Any], checkpoint: str) -> None:
    """`false` is a value too: it must not be ignored."""
    with raises_error("E-MODEL-011"):
        _ = ModelFacts(Model(name=checkpoint, **values)).config


def test_facts_that_plan_needs_do_not_import_jax() -> None:
    program = (
        "import sys\n"
        "from forerun.config.schema import Job\n"
        "from forerun.hardware.mesh import MeshShape\n"
        "from forerun.resolve.resolve_model import resolve_model\n"
        "job = Job.model_validate({'model': 'smollm2-135m', 'data': 'x', 'steps': 9, 'batch': 8,"
        " 'distil': {'teacher': 'smollm2-360m'}})\n"
        "resolved = resolve_model(job)\n"
        "resolved.derived(MeshShape(1, 8, 1)), resolved.config, resolved.teacher.config, resolved.model_facts.family\n"
        "sys.exit('jax' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_resolved_job_is_a_value() -> None:
    assert ResolvedJob(job()) == ResolvedJob(job())
    assert ResolvedJob(job()) != ResolvedJob(job(seed=1))


def test_a_model_is_resolved_without_the_data() -> None:
    """The file of the data does not exist, and the steps follow from its rows."""
    resolved = resolve_model(job(steps=None, epochs=2))
    assert (resolved.job.steps, resolved.job.epochs, resolved.vocab) == (None, 2, 49_152)


def test_an_outline_stands_for_a_model_that_does_not_exist(checkpoint: str, tmp_path: Path) -> None:
    written = job(model=str(tmp_path / "runs" / "job-sft" / "model"))
    with pytest.raises(UserError):
        resolve_model(written)
    resolved = resolve_model(written, ModelOutline(Path(checkpoint), "stage sft"))
    assert isinstance(resolved.config, DecoderConfig)
    assert (resolved.config.layers, resolved.vocab) == (LLAMA["num_hidden_layers"], LLAMA["vocab_size"])
    assert resolved.job.model.name == written.model.name
    assert resolved.starting_weights == f"weights of {written.model.name}"


def test_an_outline_reaches_the_process_that_compiles(checkpoint: str, tmp_path: Path) -> None:
    outline = ModelOutline(Path(checkpoint), "stage sft")
    resolved = resolve_model(job(model=str(tmp_path / "later")), outline)
    received = from_json(CompileRequest(resolved, slice_named("v5e-1")).to_json())
    assert received.resolved == resolved
    assert received.resolved.config == resolved.config


def test_an_error_about_an_outline_names_the_stage(checkpoint: str, tmp_path: Path) -> None:
    content = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(content | {"hidden_size": "wide"}), "utf-8")
    with pytest.raises(UserError) as refused:
        resolve_model(job(model=str(tmp_path / "later")), ModelOutline(Path(checkpoint), "stage sft"))
    assert "stage sft" in str(refused.value)
