"""Programs with one collective each: the compiler's own text against the strategy and the time of the model.

The text of a compiled program states the strategy. The program that `plan` reads does not, so the model predicts it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import Instruction, Module, parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.collectives.collective_cost import CollectiveCost, stated_strategy
from forerun.planner.time.collectives.replica_groups import replica_groups
from forerun.planner.time.collectives.torus import Torus
from forerun.planner.time.transfers import is_collective

ROWS, COLUMNS = 1024, 2048
PART = ROWS * COLUMNS * 2  # bytes of one device: 4 MiB
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "all-gather": lambda x, axes: jax.lax.all_gather(x, axes, axis=0, tiled=True),
    "all-reduce": lambda x, axes: jax.lax.psum(x, axes),
    "reduce-scatter": lambda x, axes: jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True),
    "all-to-all": lambda x, axes: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
}


@cache
def mesh_on(name: str, sizes: tuple[int, ...]) -> Mesh:
    on = slice_named(name)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=on.topology, **on.topology_options).devices
    grid = mesh_utils.create_device_mesh(sizes, devices=list(devices), allow_split_physical_axes=True)
    return Mesh(grid, ("a", "b")[: len(sizes)])


def compiled(name: str, sizes: tuple[int, ...], op: str, axes: tuple[str, ...]) -> tuple[Module, Instruction]:
    mesh = mesh_on(name, sizes)
    everywhere = PartitionSpec(mesh.axis_names)
    function = jax.shard_map(
        lambda x: OPERATIONS[op](x, axes), mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    array = jax.ShapeDtypeStruct((ROWS * mesh.size, COLUMNS), jnp.bfloat16, sharding=NamedSharding(mesh, everywhere))
    jax.config.update("jax_enable_compilation_cache", False)  # programs for a TPU elsewhere cannot be read back
    try:
        module = parse(jax.jit(function).lower(array).compile().as_text())
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    found = [x for one in module.computations.values() for x in one.instructions if is_collective(x)]
    return module, next(x for x in found if replica_groups(x))


ALL = ("a", "b")
# The slice, its mesh, the collective and its axes; the rings of the phases, and the bytes on the busiest link.
CASES = [
    ("v4-32", (4, 4), "all-gather", ("b",), (2, 2), 1.5 * PART),
    ("v4-32", (4, 4), "all-gather", ("a",), (4,), 3 * PART),  # an open axis: three parts through the first link
    ("v4-32", (4, 4), "all-reduce", ALL, (2, 2, 4), 2 * PART / 3 * (3 / 4 + 1 / 4 / 2 + 1 / 8 / 2)),
    ("v5e-16", (4, 4), "all-gather", ("b",), (4,), 3 * PART),
    ("v5e-16", (4, 4), "all-gather", ALL, (16,), 15 / 2 * PART),
    ("v5e-16", (4, 4), "all-reduce", ALL, (4, 4), 2 * PART / 2 * 15 / 16),
    ("v5e-16", (4, 4), "all-to-all", ("b",), None, PART),  # half of a row's parts cross its middle
    ("v5p-128", (16, 4), "all-gather", ("a",), (16,), 15 / 2 * PART),
    ("v5p-128", (16, 4), "all-gather", ("b",), (4,), 3 / 2 * PART),  # closed
    ("v5p-128", (16, 4), "reduce-scatter", ("a",), (16,), 15 / 16 / 2 * PART),
    ("v5p-128", (16, 4), "all-reduce", ("a",), (4, 4), 2 * PART / 4 * 15 / 16),
    ("v5p-128", (16, 4), "all-reduce", ALL, (4, 4, 4), 2 * PART / 6 * 63 / 64),
    ("v6e-8", (8,), "all-gather", ("a",), (8,), 7 / 2 * PART),
    ("v6e-8", (8,), "all-reduce", ("a",), (8,), 2 * PART / 2 * 7 / 8),
    ("v6e-8", (8,), "reduce-scatter", ("a",), (8,), PART / 2 * 7 / 8),
    ("v6e-64", (8, 8), "all-reduce", ALL, (8, 8), 2 * PART / 2 * 63 / 64),
]


@pytest.mark.parametrize(("name", "sizes", "op", "axes", "phases", "through_a_link"), CASES)
def test_strategy_and_time(
    name: str,
    sizes: tuple[int, ...],
    op: str,
    axes: tuple[str, ...],
    phases: tuple[int, ...] | None,
    through_a_link: float,
) -> None:
    module, x = compiled(name, sizes, op, axes)
    stated = stated_strategy(x.attributes)
    assert (sorted(stated.phases) if stated else None) == (sorted(phases) if phases else None)
    on = slice_named(name)
    machine = chip_model_of(on.chip)
    computation = next(one for one in module.computations.values() if x.name in one.by_name)
    cost = CollectiveCost(module, machine, Torus.of(on))
    seconds = cost.seconds(computation, x, scattered=op == "reduce-scatter")
    assert seconds == pytest.approx(through_a_link / machine.link_bytes_per_second, rel=0.1, abs=20e-6)
    silent = replace(x, attributes=re.sub(r"collective_algorithm_config.*", "", x.attributes))
    assert cost.seconds(computation, silent, scattered=op == "reduce-scatter") == seconds, "the predicted strategy"
    places = Torus.of(on).places(sizes)
    coordinates = [tuple(device.coords)[: len(on.shape)] for device in mesh_on(name, sizes).devices.flat]
    assert [place[: len(on.shape)] for place in places] == coordinates
    mesh = mesh_on(name, sizes)
    assert len(replica_groups(x)[0]) == prod(mesh.shape[axis] for axis in axes)


def test_tpu7x_offloads_collectives_to_sparse_cores() -> None:
    """Each core gathers from 16 chips of two axes, over four rings in parallel: one per axis and direction."""
    mesh = mesh_on("tpu7x-4x4x4", (32, 4))
    module, x = compiled("tpu7x-4x4x4", (32, 4), "all-gather", ("b",))
    assert "SPARSECORE" in x.attributes
    assert x.attributes.count("phase_rings") == 2, "one axis: one ring in each direction"
    assert len(replica_groups(x)[0]) == 4
    on = slice_named("tpu7x-4x4x4")
    machine, computation = chip_model_of(on.chip), next(c for c in module.computations.values() if x.name in c.by_name)
    seconds = CollectiveCost(module, machine, Torus.of(on)).seconds(computation, x, offloaded=True)
    both_cores = 2 * 3 / 2 * PART
    assert mesh.size == 128
    assert seconds == pytest.approx(both_cores / machine.link_bytes_per_second, rel=0.1, abs=20e-6)
