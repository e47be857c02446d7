"""The slices of the table, asked of the TPU compiler, which knows how many devices and hosts each topology has."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from forerun.hardware.slices import slice_named, slices

ASK = """
import json, sys
from jax.experimental import topologies
for name, topology, options in json.load(sys.stdin):
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    hosts = len({device.process_index for device in devices})
    print("answer", json.dumps([name, len(devices), hosts, devices[0].device_kind]), flush=True)
"""
EXPLICIT = ("v5p:8x8x24", "tpu7x:4x8x12")


@pytest.mark.aot
def test_devices_and_hosts_of_every_slice() -> None:
    from forerun.hardware.chips import chip_of_device_kind

    asked = [*slices(), *map(slice_named, EXPLICIT)]
    question = json.dumps([(entry.name, entry.topology, entry.topology_options) for entry in asked])
    done = subprocess.run([sys.executable, "-c", ASK], input=question, capture_output=True, text=True, timeout=1200)
    answers = [json.loads(line.removeprefix("answer ")) for line in done.stdout.splitlines() if line[:7] == "answer "]
    told = {name: (devices, hosts, kind) for name, devices, hosts, kind in answers}
    assert set(told) == {entry.name for entry in asked}, done.stderr[-2000:]
    for entry in asked:
        devices, hosts, kind = told[entry.name]
        assert (entry.name, entry.devices, entry.hosts) == (entry.name, devices, hosts)
        assert chip_of_device_kind(kind) == entry.chip


@pytest.mark.aot
def test_devices_that_fill_no_box_are_rejected() -> None:
    ask = """
from jax.experimental import topologies
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.program.build import make_mesh
devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices
for count in (1, 2, 3, 4, 8):
    try:
        print("answer", count, make_mesh(MeshShape(1, count, 1), devices[:count]).devices.size, flush=True)
    except UserError as error:
        print("answer", count, type(error).__name__, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=600)
    answers = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("answer")]
    assert answers == [["1", "1"], ["2", "2"], ["3", "UserError"], ["4", "4"], ["8", "8"]], done.stderr[-2000:]
