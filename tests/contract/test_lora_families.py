"""Adapters of modules that transformers fuses or stores the other way round: to PEFT with equal logits, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_assertions import raises_error
from lora_reference import checkpoint, job_in, torch_logits, torch_model

from forerun.hardware.devices import choose
from forerun.models.model_facts import ModelFacts
from forerun.nn.compute import Compute
from forerun.nn.weights import lowrank
from forerun.nn.weights.dense import map_weights
from forerun.nn.weights.lowrank import LowRank
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.run_devices import program_on
from forerun.trained_model.base_weights import read_file_weights
from forerun.trained_model.peft_folder import read_adapter, write_adapter

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
IDS = np.frombuffer(b"5 pears and 2 apples", np.uint8)


def prepared(folder: Path, family: str, lora: str) -> tuple[Any, Any, Any]:
    """(job, program, parameters) with adapters that change something."""
    checkpoint(folder / "base", family)
    job = job_in(folder, f"{{{lora}, base: float32}}")
    program = program_on(ResolvedJob(job), choose("cpu", 1), 100)
    key = jax.random.key(5)

    def moved(weight: Any) -> Any:
        if not isinstance(weight, LowRank):
            return weight
        length = weight.length if weight.length is None else weight.length * 1.25
        return replace(weight, up=0.1 * jax.random.normal(key, weight.up.shape), length=length)

    return (
        job,
        program,
        map_weights(moved, program.initial_state(0, read_file_weights(ResolvedJob(job), program)).params),
    )


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("Phi3", "rank: 3"),
        ("Phi3", "rank: 3, rslora: true, targets: [query, value, gate]"),
        ("GPT2", "rank: 3, dora: true"),
        ("Olmo2", "rank: 3, targets: [q_proj, 'blocks.down']"),
    ],
)
def test_peft_loads_it_with_equal_logits(family: str, lora: str, tmp_path: Path) -> None:
    import peft

    job, program, params = prepared(tmp_path, family, lora)
    named = ModelFacts(job.model).family
    assert named is not None
    (tmp_path / "peft").mkdir()
    write_adapter(tmp_path / "peft", params, job, named, program.model, "base")
    theirs = peft.PeftModel.from_pretrained(torch_model(tmp_path / "base"), tmp_path / "peft")
    ids = IDS[None].astype(np.int32)
    where = np.arange(ids.shape[1], dtype=np.int32)[None]
    expected = torch_logits(theirs, IDS)

    @jax.jit
    def ours(params: Any) -> jax.Array:
        return program.model.apply(params, ids, np.ones_like(ids), where, Compute()).logits()[0]

    np.testing.assert_allclose(np.asarray(ours(params)), expected, atol=3e-5)
    np.testing.assert_allclose(np.asarray(ours(lowrank.plain(params, jnp.float32))), expected, atol=3e-5)
    assert np.abs(np.asarray(ours(lowrank.bare(params))) - expected).max() > 1e-2, "the adapters change nothing"

    back = read_adapter(tmp_path / "peft", ResolvedJob(job), program.state.params)
    for path, halves in back.items():
        weight = getattr(getattr(params, path.split(".")[0]), path.split(".")[1])
        for name, array in halves.items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(getattr(weight, name)))


def test_dora_on_part_of_a_fused_module_is_refused(tmp_path: Path) -> None:
    job, program, params = prepared(tmp_path, "Phi3", "rank: 2, dora: true, targets: [query]")
    named = ModelFacts(job.model).family
    assert named is not None
    (tmp_path / "peft").mkdir()
    with raises_error("E-WEIGHTS-001", "self_attn.qkv_proj"):
        write_adapter(tmp_path / "peft", params, job, named, program.model, "base")
