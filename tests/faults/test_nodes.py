"""A run on GPU nodes has one process per node, with all devices of the node. Two nodes here have four CPU devices each.

The mesh is that of two GPU nodes: fsdp crosses the nodes, and tp stays inside them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import WAITS, Bench
from runs_hosts import GENTLE, TOLERANCE, HostsRun

pytestmark = [pytest.mark.slow, pytest.mark.timing]

STEPS, DEVICES, NODES = 6, 8, 2
MESH = ("mesh.data=1", "mesh.fsdp=4", "mesh.tp=2")
# Slurm sets these for each task. jax would read from them that a process has one GPU only.
SLURM = {"SLURM_JOB_ID": "7", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "node[0-1]"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("nodes") / "bench", steps=STEPS, every=STEPS, job=GENTLE)


def program_of(job: HostsRun) -> dict[str, object]:
    file: Path = job.run.folder / "program.json"
    return dict(json.loads(file.read_text()))


def started(bench: Bench, name: str, nodes: int) -> HostsRun:
    flags = f"--xla_force_host_platform_device_count={DEVICES // nodes} {WAITS}"
    return HostsRun(bench, name, nodes, *MESH, environment={"XLA_FLAGS": flags, **SLURM}).start_all()


def test_two_nodes_train_as_one_machine(bench: Bench) -> None:
    with started(bench, "one-machine", 1) as one:
        assert one.wait() == [0], one.said()
    with started(bench, "two-nodes", NODES) as two:
        assert two.wait() == [0] * NODES, two.said()
    assert "mesh 1x4x2" in two.said()
    expected, found = one.run.outcome(), two.run.outcome()
    assert found.ledger == expected.ledger, "each node reads the rows of its own devices"
    assert set(found.losses) == set(range(1, STEPS + 1))
    for step, loss in expected.losses.items():
        assert float.fromhex(found.losses[step]) == pytest.approx(float.fromhex(loss), rel=TOLERANCE)
    assert program_of(two)["program"] == program_of(one)["program"]
