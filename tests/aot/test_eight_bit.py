"""The compiled programs of real chips multiply operands of 8 bits."""

from __future__ import annotations

import re

import pytest
from jax.experimental import topologies

from forerun.config.schema import Job
from forerun.hardware.devices import DeviceChoice
from forerun.hardware.slices import slice_named
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.run_devices import program_on

pytestmark = pytest.mark.aot

MATRICES = 7  # of a layer: four of attention, three of the MLP


def compiled_text(slice_name: str, kind: str) -> str:
    job = Job.model_validate(
        {
            "model": {"layers": 2, "embed": 512, "heads": 4, "head_dim": 128, "mlp": 1024, "vocab": 512},
            "data": "nothing",
            "sequence": 256,
            "batch": 16,
            "steps": 10,
            "precision": {"matmul": kind},
        }
    )
    wanted = slice_named(slice_name)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=wanted.topology, **wanted.topology_options)
    program = program_on(ResolvedJob(job), DeviceChoice("tpu", tuple(topology.devices), "for the test"), None)
    return str(program.trace().lower().compile().as_text())


def products_of(text: str, operand: str) -> int:
    """Return how many convolutions have two operands of this type. The TPU compiler writes products as convolutions."""
    types = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    found = re.findall(r" convolution\((?:\w+\[[^ ]* )?(%[\w.-]+), (?:\w+\[[^ ]* )?(%[\w.-]+)\)", text)
    assert found
    return sum(types[left].startswith(operand) and types[right].startswith(operand) for left, right in found)


def test_v6e_multiplies_int8() -> None:
    """Forward, again for the backward pass except for the last matrix, and two gradients of each matrix."""
    text = compiled_text("v6e-8", "int8")
    assert products_of(text, "s8") == 4 * MATRICES - 1
    gathered = re.findall(r"= \(?(\w+)\[\d*,?(?:512,4,128|512,1024|1024,512|4,128,512)\]\S* all-gather", text)
    assert "f32" not in gathered


@pytest.mark.slow
def test_tpu7x_multiplies_fp8() -> None:
    assert products_of(compiled_text("tpu7x-2x2x1", "fp8"), "f8e") == 4 * MATRICES - 1
