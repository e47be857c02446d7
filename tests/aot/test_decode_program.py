"""Compile one decoded token for TPUs: the program reads and writes the cache in place and never copies it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from forerun.generate.engine import Engine
from forerun.generate.sampling import Rule
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.models.layer_kinds import LayerKind
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.rope import Rope
from forerun.nn.sharding import stored
from forerun.program.build import make_mesh

pytestmark = pytest.mark.aot
ROWS, LENGTH = 8, 1024
ROPE = Rope(10_000.0, 128)
PLAIN = DecoderConfig(6, 256, 4, 2, 128, 512, 1024, qk_norm=True)
GEMMA = DecoderConfig(
    *(7, 256, 4, 2, 128, 512, 1024),  # three periods of two layers, and a tail
    attention_softcap=50.0,
    logit_softcap=30.0,
    kinds=(LayerKind(512, ROPE), LayerKind(None, ROPE)),
)


@pytest.fixture(autouse=True)
def _no_compile_cache() -> Iterator[None]:
    """A program for a TPU cannot be read back on a machine without one."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize(
    ("slice_name", "shape", "config"),
    [
        ("v5e-1", MeshShape(1, 1, 1), PLAIN),
        ("v5e-1", MeshShape(1, 1, 1), GEMMA),
        ("v6e-1", MeshShape(1, 1, 1), GEMMA),
        ("v5e-4", MeshShape(1, 2, 2), GEMMA),
    ],
    ids=["v5e plain", "v5e windows and soft caps", "v6e windows and soft caps", "v5e-4 windows and soft caps"],
)
def test_a_decoded_token_does_not_copy_the_cache(slice_name: str, shape: MeshShape, config: DecoderConfig) -> None:
    where = slice_named(slice_name)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=where.topology, **where.topology_options)
    model, mesh = Decoder(config), make_mesh(shape, topology.devices[: shape.devices])

    def small(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def weight(s: spec.ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, jnp.bfloat16, sharding=stored(mesh, s.shape, s.axes))

    params = spec.map_specs(weight, model.specs())
    engine = Engine(model, params, mesh, Compute(jnp.dtype("bfloat16")), frozenset(), model.vocab)

    def cached(s: spec.ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=engine._laid_out(s))

    cache = spec.map_specs(cached, model.cache(ROWS, LENGTH, jnp.bfloat16))
    tokens, rows = small((ROWS,), jnp.int32), small((ROWS,), jnp.uint32)
    with jax.set_mesh(mesh):
        program = engine.step.lower(
            *(params, tokens, tokens, small((ROWS,), bool), cache),
            *(small((), jnp.uint32), rows, small((), jnp.float32)),
            rule=Rule(greedy=True),
        ).compile()

    own = [array.sharding.shard_shape(array.shape) for array in jax.tree.leaves(cache)]  # on one device
    made = re.findall(rf"bf16\[{','.join(map(str, own[0]))}\]\S* ([a-z-]+)\(", program.as_text())
    assert "dynamic-update-slice" in made
    assert not {"copy", "copy-start", "scatter", "all-gather", "transpose"} & set(made)
    memory = program.memory_analysis()
    assert memory is not None
    cache_bytes = sum(2 * math.prod(dims) for dims in own)
    assert memory.alias_size_in_bytes >= cache_bytes, "written in place"
    assert memory.temp_size_in_bytes < cache_bytes / 4
