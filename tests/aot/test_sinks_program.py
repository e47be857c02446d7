"""The programs of gpt-oss for real chips: splash kernels with sinks, in layers with and without a window."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from jax.experimental import topologies

from forerun.config.schema import Job
from forerun.hardware.devices import DeviceChoice
from forerun.hardware.slices import slice_named
from forerun.models import sizes
from forerun.planner.hlo import parse
from forerun.planner.time.splash_cost import kernel_shape
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.run_devices import program_on

pytestmark = pytest.mark.aot

NAME, LENGTH, HEADS, HEAD = "gpt-oss-20b", 2048, 8, 64


@pytest.mark.parametrize(
    ("slice_name", "kinds"),
    [("v6e-8", {"forward", "backward"}), pytest.param("v5e-8", {"forward", "backward"}, marks=pytest.mark.slow)],
)
def test_the_kernels_have_sinks(slice_name: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    full = sizes.SIZES[NAME]
    assert full.experts is not None
    small = replace(
        full, layers=2, embed=256, heads=HEADS, kv_heads=2, vocab=512, experts=replace(full.experts, count=8, mlp=128)
    )
    monkeypatch.setitem(sizes.SIZES, NAME, small)
    job = {"model": NAME, "data": "nothing", "sequence": LENGTH, "batch": 8, "steps": 10}
    wanted = slice_named(slice_name)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=wanted.topology, **wanted.topology_options)
    choice = DeviceChoice("tpu", tuple(topology.devices), "for the test")
    program = program_on(ResolvedJob(Job.model_validate(job)), choice, None)
    assert program.compute.attention.name == "splash"
    text = str(program.trace().lower().compile().as_text())
    module = parse(text)
    found = [
        shape
        for computation in module.computations.values()
        for x in computation.instructions
        if (shape := kernel_shape(computation, x)) is not None
    ]
    assert {shape.kind for shape in found} == kinds
    assert {(shape.sequence, shape.keys, shape.head, shape.programs) for shape in found} == {
        (LENGTH, LENGTH, HEAD, HEADS)
    }
    assert min(Counter(shape.kind for shape in found).values()) >= 2, "a layer with a window and one without"
    calls = [line for line in text.splitlines() if re.search(r"splash_m[hq]a_fwd\S* = ", line)]
    assert calls
    assert all(re.search(rf"f32\[\d+,{HEADS}\]", _operands(text, line)) for line in calls), "sinks are an operand"


def _operands(text: str, line: str) -> str:
    """Return the definitions of the operands of an instruction."""
    names = re.findall(r"%[\w.-]+", line.split("custom-call(")[1].split("), custom_call_target")[0])
    return "\n".join(re.findall("|".join(rf"{re.escape(name)} = \S+" for name in names), text))
