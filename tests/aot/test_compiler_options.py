"""forerun's compiler options: each generation's compiler accepts them for every layout."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.chips import device_kind_of
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest
from forerun.program.build import make_mesh
from forerun.program.compiler_options import compile_lowered, compiler_options
from forerun.resolve.resolved_job import ResolvedJob

pytestmark = pytest.mark.aot

SLICES = ("v4-16", "v5e-8", "v5p-16", "v6e-8", "tpu7x-2x2x1")
WEIGHTS, ROWS = PartitionSpec("fsdp", "tp"), PartitionSpec(("data", "fsdp"))


def loss(weights: tuple[jax.Array, jax.Array], rows: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(rows @ weights[0])
    return jnp.sum((hidden @ weights[1].T).astype(jnp.float32) ** 2)


def lowered(slice_name: str, shape: MeshShape) -> Any:
    """Return a gradient with the collectives of a training step: gathers, reductions and scatters of weights."""
    where = slice_named(slice_name)
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=where.topology, **where.topology_options
    ).devices
    mesh = make_mesh(shape, devices)
    weight = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, WEIGHTS))
    rows = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, ROWS))
    split = NamedSharding(mesh, WEIGHTS)
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss), out_shardings=(split, split)).trace((weight, weight), rows).lower()


@pytest.mark.parametrize("slice_name", SLICES)
def test_the_compiler_accepts_the_options_of_each_layout(slice_name: str) -> None:
    where = slice_named(slice_name)
    kind, devices = device_kind_of(where.chip), where.devices
    assert kind is not None
    jax.config.update("jax_enable_compilation_cache", False)  # a program for another device cannot be read back
    try:
        for shape in (MeshShape(1, devices, 1), MeshShape(devices, 1, 1), MeshShape(1, devices // 4, 4)):
            options = compiler_options("tpu", kind, shape)
            text = compile_lowered(lowered(slice_name, shape), options.values).as_text()
            assert "all-" in text or "reduce-scatter" in text
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_plan_reports_an_option_that_the_compiler_does_not_know() -> None:
    job = Job.model_validate(
        {
            "model": {"layers": 1, "embed": 128, "heads": 1, "vocab": 512},
            "data": "nothing",
            "sequence": 128,
            "batch": 8,
            "steps": 1,
            "compiler_options": {"xla_tpu_of_tomorrow": True},
        }
    )
    with pytest.raises(UserError, match="xla_tpu_of_tomorrow") as caught:
        compiler.ask(CompileRequest(ResolvedJob(job), slice_named("v5e-8")), threading.Event(), lambda phase: None)
    assert caught.value.code == "E-COMMAND-097"
