"""Tests of the supervisors with real jax workers: the stacks name a stuck host, and only one port is open."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hosts_job import PatientJob, listened_on

pytestmark = pytest.mark.timing

STEPS = 60


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    with PatientJob(tmp_path_factory.mktemp("whole"), 2, kind="jax", steps=STEPS) as job:
        assert job.start_all().wait() == [0, 0], job.said()
        return job.values()


def test_a_host_that_sleeps_inside_a_step_is_named_by_its_stack(tmp_path: Path, expected: dict[int, str]) -> None:
    limits = {"stall_floor": 8.0, "stacks": 120.0}
    with PatientJob(tmp_path, 2, kind="jax", steps=STEPS, fault="sleep:1:17", limits=limits) as job:
        assert job.start_all().wait() == [0, 0], job.said()
        assert job.log("culprit")[0]["host"] == 1
        assert "in main (" in job.said(0)
        assert "inside jax" in job.said(0)
        assert job.values() == expected


def test_only_the_leader_listens_on_the_cluster_address_and_all_stop_at_one_step(
    tmp_path: Path, expected: dict[int, str]
) -> None:
    cluster = "127.0.0.2"  # an address of its own, so that gloo's ports, at the host name's address, are not on it
    with PatientJob(tmp_path, 2, kind="jax", steps=100_000, leader=cluster) as job:
        job.start_all().until("step", 1, step=12)
        assert list(listened_on(job.supervisors[0].pid)) == [(cluster, job.port)]
        assert list(listened_on(job.supervisors[1].pid)) == []
        for index in (0, 1):
            ports = list(listened_on(job.pid(index)))
            assert len(ports) == 1, "gloo's, and not the coordinator's"
            assert ports[0][0] != cluster
        os.kill(job.pid(1), signal.SIGTERM)
        assert job.wait() == [75, 75], job.said()
        stopped = job.notes("stopped")
        assert len(stopped) == 2
        assert len({note["step"] for note in stopped}) == 1
        values = job.values()
        assert all(values[step] == value for step, value in expected.items() if step in values)
