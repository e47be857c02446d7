"""XLA's GPU compiler accepts the description of every GPU of the table, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from forerun.hardware.chips import chips, device_kind_of
from forerun.hardware.slices import gpu_machines, slice_named

pytestmark = pytest.mark.skipif(
    not any(find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin")),
    reason="the GPU compiler is not installed: pip install '.[plan-gpu]'",
)
# One process describes all machines: loading the plugin takes most of the time.
SCRIPT = """
import json, sys
from forerun.hardware.slices import slice_named
from forerun.planner.compile.installed_compilers import compile_only_topology
found = {}
for name in sys.argv[1:]:
    devices = compile_only_topology(slice_named(name)).devices
    found[name] = [len(devices), devices[0].device_kind, devices[0].compute_capability]
print(json.dumps(found))
"""


def test_every_gpu_is_described() -> None:
    machines = [machine for machine in gpu_machines() if machine.chips in (1, 8)] + [slice_named("h100-8x2")]
    command = [sys.executable, "-P", "-c", SCRIPT, *(machine.name for machine in machines)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2 * sum(chip.gpu is not None for chip in chips()) + 1
    for machine in machines:
        assert machine.chip.gpu is not None
        major, minor = machine.chip.gpu.compute_capability
        assert found[machine.name] == [machine.devices, device_kind_of(machine.chip), f"{major}.{minor}"]
