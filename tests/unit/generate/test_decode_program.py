"""What a decoded token costs, in the program that XLA compiles for it: the cache is read once and written in place."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from forerun.generate.engine import Chooser, Engine, Settings
from forerun.hardware.mesh import MeshShape
from forerun.models.base import Model
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig, Gpt2Config
from forerun.models.gpt2 import Gpt2
from forerun.models.layer_kinds import LayerKind
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.rope import Rope
from forerun.program.build import make_mesh

LENGTH = 768
ROPE = Rope(10_000.0, 8)
MODELS: dict[str, Model] = {
    "decoder": Decoder(DecoderConfig(4, 32, 4, 2, 8, 48, 64, qk_norm=True)),
    "windows and soft caps": Decoder(
        DecoderConfig(
            *(5, 32, 4, 2, 8, 48, 64),  # two periods of two layers, and a tail
            attention_softcap=50.0,
            logit_softcap=30.0,
            kinds=(LayerKind(100, ROPE), LayerKind(None, ROPE)),
        )
    ),
    "gpt2": Gpt2(Gpt2Config(4, 32, 4, 64, 64, LENGTH)),
}


@dataclass(frozen=True)
class Decoding:
    """The compiled program and the shapes of the cache's arrays."""

    text: str
    temporaries: int
    cache_bytes: int
    cache_shapes: set[tuple[int, ...]]


def compiled(name: str, rows: int, consume: bool) -> Decoding:
    model, mesh = MODELS[name], make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])
    params = spec.initial(model.specs(), jax.random.key(0))
    engine = Engine(model, params, mesh, Compute(), frozenset(), model.vocab, consume=consume)
    chooser = Chooser(engine, Settings(4, tiny.GREEDY), np.arange(rows, dtype=np.uint32))
    numbers = jnp.zeros(rows, jnp.int32)
    with jax.set_mesh(mesh):
        cache = engine._empty(rows=rows, length=LENGTH)
        arguments = (engine.params, numbers, numbers, jnp.ones(rows, bool), cache)
        program = engine.step.lower(*arguments, *chooser.arguments, rule=chooser.rule).compile()
    arrays = jax.tree.leaves(cache)
    shapes = {array.shape for array in arrays}
    assert all(LENGTH in shape for shape in shapes)
    memory = program.memory_analysis()
    assert memory is not None
    return Decoding(
        program.as_text(), memory.temp_size_in_bytes, sum(4 * math.prod(array.shape) for array in arrays), shapes
    )


@pytest.mark.parametrize(
    ("name", "rows", "consume"),
    [
        ("decoder", 1, False),
        ("decoder", 4, False),
        ("decoder", 1, True),
        ("windows and soft caps", 4, False),
        ("windows and soft caps", 4, True),
        ("gpt2", 4, False),
    ],
)
def test_a_decoded_token_neither_copies_nor_scatters_into_the_cache(name: str, rows: int, consume: bool) -> None:
    found = compiled(name, rows, consume)
    for shape in found.cache_shapes:
        written = re.findall(rf"f32\[{','.join(map(str, shape))}\]\S* ([a-z-]+)\(", found.text)
        assert "dynamic-update-slice" in written
        assert not {"copy", "scatter", "select", "transpose"} & set(written)
    assert found.temporaries < found.cache_bytes
    if consume:
        assert found.temporaries < found.cache_bytes / 4


@pytest.mark.parametrize("name", tiny.MODELS)
def test_layers_that_are_apart_give_the_same_tokens_and_free_the_stacked_weights(name: str) -> None:
    rows = tiny.prompts(5, 1, 30)
    model, mesh = tiny.MODELS[name], make_mesh(tiny.ONE, jax.devices()[:1])
    params = jax.tree.map(jnp.copy, tiny.weights(name))
    engine = Engine(model, params, mesh, Compute(), frozenset(), tiny.VOCAB, consume=True)
    assert tiny.generated(engine, rows, tiny.settings(24)) == [tiny.recomputed(name, row, 24) for row in rows]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params.blocks))
    assert isinstance(engine.params.blocks, tuple)


def test_layers_of_several_kinds_give_the_same_tokens_stacked_and_apart() -> None:
    model, mesh = MODELS["windows and soft caps"], make_mesh(tiny.ONE, jax.devices()[:1])
    rows = tiny.prompts(120, 3)
    found = []
    for consume in (False, True):
        params = jax.tree.map(lambda x: x if x.ndim < 2 else x * 12, spec.initial(model.specs(), jax.random.key(3)))
        engine = Engine(model, params, mesh, Compute(), frozenset(), tiny.VOCAB, consume=consume)
        found.append(tiny.generated(engine, rows, tiny.settings(12)))
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 4
