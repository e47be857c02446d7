"""What can be wrong when the hosts of a run start: each mistake has a text of its own, on the host that can mend it."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hosts_job import PatientJob, gone

from forerun.exit_codes import STORAGE_FAILED

pytestmark = pytest.mark.timing

STEPS = 30
ENDLESS = 1_000_000
GATHER_SECONDS = 15  # for those that do come: they are there already, and try every two seconds


def start_connecting(job: PatientJob, index: int, **others: Any) -> None:
    """Start a host, and return when it tries to connect to the leader, which may take long on a busy machine."""
    with socket.create_server((job.leader, job.port)) as server:
        server.settimeout(900)
        job.start(index, **others)
        server.accept()[0].close()


def test_a_missing_host_is_named(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 3, steps=STEPS, limits={"gather": 600}) as job:
        start_connecting(job, 2)
        job.limits["gather"] = GATHER_SECONDS
        job.start(0)
        assert job.wait() == [2, 2]
        for index in (0, 2):
            assert "[E-HOSTS-030]" in job.said(index)
            assert f"127.0.0.1:{job.port}: host 0" in job.said(index)
        assert job.notes("pid") == []


def test_a_wrong_address_is_named(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, limits={"gather": 2}) as job:
        job.start(1)
        assert job.wait() == [2]
        assert "[E-HOSTS-001]" in job.said(1)
        assert f"127.0.0.1:{job.port}" in job.said(1)


def test_something_else_at_the_address_is_named(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        # it waits for the client to speak first, as the client does for a leader
        with PatientJob(tmp_path, 2, limits={"gather": 1, "handshake": 0.5}) as job:
            job.start(1, port=web.server_port)
            assert job.wait() == [2]
            assert "no answer within" in job.said(1)
        web.shutdown()


def test_a_wrong_secret_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=STEPS) as job:
        other = tmp_path / "other"
        other.write_text("another secret, just as long")
        other.chmod(0o600)
        job.start(0)
        stranger = job.start(1, secret=other, name="stranger")
        assert stranger.wait(300) == 2
        assert "[E-HOSTS-003]" in (tmp_path / "stranger.log").read_text()
        job.start(1)
        assert job.wait()[:2] == [0, 0], job.said()
        assert job.said(0).count("connection from 127.0.0.1") == 1


def test_hosts_that_differ_are_named(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=STEPS) as job:
        job.start(0)
        job.start(1, identity={"job": "2", "jax": "0.0.1"})
        assert job.wait() == [2, 2]
        for index in (0, 1):
            assert "[E-HOSTS-031]" in job.said(index)
            assert "host 1: 0.0.1" in job.said(index)


def test_another_number_of_hosts_is_refused(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=STEPS, limits={"gather": 600}) as job:
        start_connecting(job, 1, hosts={"count": 3})
        job.limits["gather"] = GATHER_SECONDS
        job.start(0)
        assert job.wait() == [2, 2]
        assert "[E-HOSTS-007]" in job.said(1)
        assert "[E-HOSTS-030]" in job.said(0)


def test_two_hosts_with_one_index(tmp_path: Path) -> None:
    limits = {"beat": 15.0}  # after three of which a host is not there
    with PatientJob(tmp_path, 2, steps=ENDLESS, limits=limits) as job:
        job.start_all().until("step", 1, step=5)
        second = job.start(1, name="second")
        assert second.wait(300) == 2
        assert "[E-HOSTS-032]" in (tmp_path / "second.log").read_text()
        assert job.log("fault") == []
        assert all(child.poll() is None for child in (job.supervisors[0], job.supervisors[1]))


def test_a_second_launcher_is_refused(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 1, steps=ENDLESS) as job:
        first = job.start(0, port=0)
        job.until("step", 0, step=5)
        second = job.start(0, port=0, name="second")
        assert second.wait(300) == 2
        text = (tmp_path / "second.log").read_text()
        assert "[E-HOSTS-019]" in text
        assert f"process {first.pid} on {socket.gethostname()}" in text
        assert first.poll() is None


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, PatientJob(tmp_path, 2) as job:
        port = other.getsockname()[1]
        assert job.start(0, port=port).wait(300) == 2
        assert "[E-HOSTS-006]" in job.said(0)
        assert f"port {port}" in job.said(0)


def test_a_users_mistake_ends_the_job_everywhere_without_a_restart(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=STEPS, fault="mistake:1:0") as job:
        assert job.start_all().wait() == [2, 2]
        assert len(job.log("start")) == 1
        for index in (0, 1):
            assert "fix: lr: 10" in job.said(index)


def test_data_that_differs_between_hosts_ends_the_job(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=ENDLESS, fault="digest:1:0") as job:
        assert job.start_all().wait() == [2, 2]
        assert "[E-HOSTS-031]" in job.said(1)
        for digest in ("data digest", "host 0: 1234", "host 1: 0000"):
            assert digest in job.said(0)


def test_a_job_that_always_dies_is_given_up_and_each_death_is_told(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=STEPS, fault="crash", limits={"restarts": 2, "backoff": 0.1}) as job:
        assert job.start_all().wait() == [70, 70]
        assert len(job.log("start")) == 3
        for attempt in (1, 2, 3):
            assert f"ValueError: attempt {attempt} came to nothing" in job.said(1)


def test_a_disk_that_fails_before_the_first_step_ends_the_job_at_once(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=STEPS, fault="disk:1:0") as job:
        assert job.start_all().wait() == [STORAGE_FAILED, STORAGE_FAILED]
        assert "fix: make room" in job.said(0)
        assert len(job.log("start")) == 1


def test_the_worker_does_not_know_the_secret(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 1, steps=ENDLESS) as job:
        job.start(0, port=0, FORERUN_SECRET="a secret that was given by the environment")
        job.until("step", 0, step=5)
        with open(f"/proc/{job.pid(0)}/environ", "rb") as file:
            assert b"a secret that was given" not in file.read()
        os.kill(job.supervisors[0].pid, signal.SIGTERM)
        assert job.wait() == [75]
        assert gone(job.pid(0))
