"""Named sizes of the table: all are counted, and one of each kind is lowered for a TPU slice.

Small copies of three kinds are stepped, also on the newest jax. tests/contract/test_families.py steps all families.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np
import pytest

from forerun.config.schema import Job, Model, RopeScaling
from forerun.hardware.mesh import MeshShape
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.models.families.registry import family_for
from forerun.models.model_facts import model_of
from forerun.models.sizes import SIZES
from forerun.nn import sharding, spec
from forerun.program.build import Program, build, make_mesh
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob

# The parameter counts of the published checkpoints (sum of the sizes in their safetensors index).
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    # The published files also contain a vision tower: the text part as transformers counts it.
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    # Published in MXFP4, with two values per byte: the parameters as transformers counts them.
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-4-26b-a4b": 25_233_141_790,  # with a scalar per layer, which transformers does not count
    "qwen3.5-35b-a3b": 34_660_610_688,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
}


def program_kind(config: DecoderConfig) -> tuple[Any, ...]:
    """Return what makes a size another kind of program and not only another width or depth."""
    return family_for(config).model_type, config.tied, config.qk_norm, config.rope_scaling is None, config.heads % 2


KINDS = {program_kind(config): name for name, config in reversed(SIZES.items())}  # the first size of each kind


def section(config: DecoderConfig) -> Model:
    given = {key: value for key, value in asdict(config).items() if value is not None and key in Model.model_fields}
    scaling = config.rope_scaling and RopeScaling.model_validate(config.rope_scaling.model_dump())
    return Model(**given | ({"rope_scaling": scaling} if scaling else {}))


def built(model: Model, shape: MeshShape, devices: Any, sequence: int) -> Program:
    job = Job(model=model, data="unread", sequence=sequence, batch=8, steps=1)
    return build(ResolvedJob(job), make_mesh(shape, devices), derive(job, shape, None))


def test_every_size_is_held_to_a_published_count() -> None:
    assert set(SIZES) == set(PUBLISHED)


@pytest.mark.parametrize("name", SIZES)
def test_parameter_count(name: str) -> None:
    assert spec.count(model_of(Model(name=name)).specs()) == PUBLISHED[name]


@pytest.mark.torch
def test_mistral_7b_is_the_default_of_transformers() -> None:
    """Its heads, its window and its RoPE do not show in the parameter count."""
    from transformers import MistralConfig

    theirs, ours = MistralConfig(), SIZES["mistral-7b"]
    assert (ours.layers, ours.embed, ours.mlp, ours.vocab, ours.heads, ours.kv_heads) == (
        *(theirs.num_hidden_layers, theirs.hidden_size, theirs.intermediate_size, theirs.vocab_size),
        *(theirs.num_attention_heads, theirs.num_key_value_heads),
    )
    expected = (
        theirs.head_dim,
        theirs.sliding_window,
        theirs.tie_word_embeddings,
        theirs.rope_parameters["rope_theta"],
    )
    assert (ours.head_dim, ours.window, ours.tied, ours.rope_theta) == expected


@pytest.mark.aot
@pytest.mark.parametrize("name", sorted(KINDS.values()))
def test_lowers_for_a_slice(name: str) -> None:
    """Two layers of the full width, through Mosaic, on eight chips that are only described."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    tp, period = math.gcd(2, SIZES[name].heads), len(SIZES[name].layer_kinds)
    # Of a hybrid, all layers of a period but one are of the same kind.
    stacked = period - 1 if SIZES[name].sections[0].stack_names else max(2, period)
    program = built(Model(name=name, layers=max(2, period)), MeshShape(1, 8 // tp, tp), devices, sequence=256)
    assert program.compute.attention.name == "splash"
    text = program.trace().lower().as_text()
    assert "tpu_custom_call" in text
    experts, mlp = SIZES[name].experts, f"{SIZES[name].embed}x{SIZES[name].mlp}"
    matrix = f"{experts.count}x{SIZES[name].embed}x{experts.mlp}" if experts else mlp
    assert f"{stacked}x{matrix}xf32" in text  # gate and up, all layers, master weights


@pytest.mark.parametrize("name", ["llama3.2-1b", "qwen3-0.6b", "mistral-7b"])
def test_a_small_copy_steps_on_eight_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start no token is likelier than another; after a step every parameter has moved and lies where it lay."""
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 256)  # its matrices count as large
    size = SIZES[name]
    kv_heads = 4 if size.kv_heads == size.heads else 2
    small = replace(size, layers=2, embed=32, heads=4, kv_heads=kv_heads, head_dim=8, mlp=48, vocab=64)
    small = replace(small, window=None if size.window is None else 5)
    program = built(section(small), MeshShape(2, 2, 2), jax.devices(), sequence=16)
    assert isinstance(program.model, Decoder)
    assert program.model.config == small

    state = program.initial_state(1)
    before = jax.tree.map(np.array, state.params)
    rng = np.random.default_rng(0)
    batch = jax.tree.map(lambda x: rng.integers(0, 64, x.shape).astype(x.dtype), program.batch)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), batch.tokens.shape)
    batch = replace(batch, weights=np.ones_like(batch.weights), segments=np.ones_like(positions), positions=positions)
    batch = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), batch, program.batch)
    state, metrics = program.trace().lower().compile()(state, batch, program.placed_schedule())

    np.testing.assert_allclose(metrics.loss, math.log(64), rtol=0.02)
    assert (int(metrics.tokens), int(state.step)) == (8 * 16, 1)
    for (path, want), have, old in zip(
        jax.tree_util.tree_leaves_with_path(program.state.params),
        jax.tree.leaves(state.params),
        jax.tree.leaves(before),
        strict=True,
    ):
        where = jax.tree_util.keystr(path)
        assert (have.dtype, have.shape) == (want.dtype, want.shape), where
        assert have.sharding.is_equivalent_to(want.sharding, have.ndim), where
        assert np.isfinite(have).all(), where
        assert (np.asarray(have) != old).any(), where
