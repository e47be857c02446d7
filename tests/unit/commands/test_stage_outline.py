"""Outlines of models that a stage will write, for families with and without an integer form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.commands.stage_outline import planning_job
from forerun.config.schema import Job
from forerun.config.stages import stages_of
from forerun.models.pretrained import pretrained
from forerun.nn.weights import lowrank
from forerun.resolve.resolved_job import ResolvedJob
from forerun.weights_io import documents
from forerun.weights_io.scales import rounded_weights

GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 264, "n_embd": 32, "n_layer": 1,
        "n_head": 4, "n_positions": 16, "n_inner": 48, "activation_function": "gelu_new",
        "eos_token_id": 256}  # fmt: skip
FREE = "{layers: 1, embed: 32, heads: 4, mlp: 48, vocab: 264}"
STAGES = "stages: {a: {qat: {weights: int4, group: 16}}, b: {lora: {rank: 2}}, c: {}, d: {lora: {rank: 2}}}"


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Job]:
    """The jobs of all stages, none of which was trained."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(GPT2))
    documents.write_tokenizer(None, base, 256)
    model = {"gpt2": str(base), "free": FREE}[request.param]
    (tmp_path / "job.yaml").write_text(f"model: {model}\ndata: texts\nsteps: 2\nsequence: 16\n{STAGES}\n")
    return [planning_job(stage) for stage in stages_of(tmp_path / "job.yaml", [f"runs={tmp_path / 'runs'}"])]


@pytest.mark.parametrize(("second", "is_packed"), [("free", True), ("gpt2", False)], indirect=["second"])
def test_the_rounding_is_known_before_the_stage_is_trained(second: list[Job], is_packed: bool, tmp_path: Path) -> None:
    rounded, merged = (pretrained(second[index].model) for index in (1, 2))
    found = rounded.packed if is_packed else rounded.recorded
    assert found is not None
    assert (found.bits, found.group) == (4, 16)
    assert (rounded.packed is not None) == is_packed
    assert merged.rounding is None
    # The specs of the run contain the scales that it will read.
    kept = [
        one for one in rounded_weights(lowrank.bare(ResolvedJob(second[1]).specs)).values() if one.scale is not None
    ]
    matrices = 4 * 32 * 32 + (3 if is_packed else 2) * 32 * 48
    assert sum(one.scale.size for one in kept if one.scale is not None) == matrices // 16
    assert all(Path(str(job.model.name)).is_relative_to(tmp_path / "cache") for job in second[1:])
