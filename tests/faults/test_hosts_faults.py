"""Hosts that die, stand still, are cut off or are told to stop: real processes and signals, workers without jax.

The values of all steps must be those of a run without a fault; they are a chain of hashes, computed here.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from hosts_job import HostsJob, PatientJob, gone
from hosts_worker import chained

pytestmark = pytest.mark.timing

STALL = {"stall_floor": 6.0, "stacks": 6.0}
STEPS = 60
CUT_OFF = "the grace time ended before all hosts had stopped"
SLOW = "slow:all:12"  # the run waits for what is done to it after step 12


def expected(steps: int = STEPS) -> dict[int, str]:
    values, value = {}, "0"
    for number in range(1, steps + 1):
        values[number] = value = chained(number, value)
    return values


def finished_exactly(job: HostsJob) -> None:
    assert job.wait() == [0] * job.hosts, job.said()
    assert job.values() == expected(job.steps)
    assert {note["host"] for note in job.notes("finished", step=job.steps)} == set(range(job.hosts))


@pytest.mark.parametrize("host", [2, 0])
def test_a_killed_worker_is_noticed_at_once_and_all_start_again(tmp_path: Path, host: int) -> None:
    silent = 600.0
    limits = {"lost": silent, "stall_floor": silent}
    with PatientJob(tmp_path, 4, steps=STEPS, fault=f"kill:{host}:13", limits=limits) as job:
        job.start_all()
        finished_exactly(job)
        [struck] = job.notes("struck")
        assert job.log("death")[0]["unix_seconds"] - struck["unix_seconds"] < silent / 3, (
            "not only when its silence is too long"
        )
        assert f"host {host} " in job.log("cause")[0]["text"]
        assert "SIGKILL" in job.said(0)
        assert [line["attempt"] for line in job.log("start")] == [1, 2]
        assert {note["step"] for note in job.notes("resumed", attempt=2)} == {10}


@pytest.mark.parametrize("host", [1, 0])
def test_a_disk_that_fails_for_a_while_is_waited_for(tmp_path: Path, host: int) -> None:
    """More often than other deaths without a new step are put up with, and never at once."""
    limits = {"restarts": 2, "backoff": 0.05, "storage": 1800.0}
    with PatientJob(tmp_path, 2, steps=STEPS, fault=f"disk:{host}:12", limits=limits) as job:
        job.start_all()
        finished_exactly(job)
        assert len(job.log("start")) == 5
        for value in ("code 74", "in 50 ms", "restart 4", "in 400 ms"):
            assert value in job.said(0)


def test_a_disk_that_does_not_come_back_is_given_up(tmp_path: Path) -> None:
    limits = {"restarts": 1, "backoff": 0.05, "storage": 0.0}
    with PatientJob(tmp_path, 2, steps=STEPS, fault="disk:1:12", limits=limits) as job:
        assert job.start_all().wait() == [70, 70]
        assert len(job.log("start")) == 2
        assert "step 12" in job.said(1)


@pytest.mark.parametrize("host", [1, 0])
def test_a_stopped_worker_is_found_and_named(tmp_path: Path, host: int) -> None:
    with PatientJob(tmp_path, 3, steps=30, fault=f"stop:{host}:13", limits=STALL) as job:
        job.start_all()
        finished_exactly(job)
        assert job.log("culprit")[0]["host"] == host
        assert gone(job.pid(host))
        assert f"host {host} is stuck" in job.said(0)
        assert "process is stopped" in job.said(0)


def test_a_worker_that_sleeps_before_a_step_is_named_with_its_frame(tmp_path: Path) -> None:
    limits = {**STALL, "stacks": 120.0, "phases": {"waiting for data": 6}}  # all can show their stacks, at last
    with PatientJob(tmp_path, 2, steps=STEPS, fault="data:1:15", limits=limits) as job:
        job.start_all()
        finished_exactly(job)
        assert job.log("culprit")[0]["host"] == 1
        assert "'waiting for data'" in job.said(0)
        assert "in main (" in job.said(0)
        assert "hosts_worker.py" in (tmp_path / "supervise" / "stacks-1-host-1.txt").read_text()


@pytest.mark.parametrize("to", ["supervisor", "worker"])
def test_sigterm_to_one_stops_all_at_one_step_and_the_run_goes_on_later(tmp_path: Path, to: str) -> None:
    with PatientJob(tmp_path, 4, steps=STEPS, fault=SLOW) as job:
        job.start_all().until("step", 2, step=12)
        os.kill(job.supervisors[2].pid if to == "supervisor" else job.pid(2), signal.SIGTERM)
        os.kill(job.supervisors[1].pid, signal.SIGTERM)
        assert job.wait() == [75] * 4, job.said()
        stopped = job.notes("stopped")
        assert len(stopped) == 4
        assert len({note["step"] for note in stopped}) == 1
        assert json.loads((tmp_path / "saved").read_text())[0] == stopped[0]["step"]
        assert f"at step {stopped[0]['step']}" in job.said(3)
        finished_exactly(job.start_all())
        assert {note["step"] for note in job.notes("resumed", attempt=2)} == {stopped[0]["step"]}


def test_a_save_that_does_not_fit_into_the_grace_is_not_begun(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=100_000, every=200_000, fault="estimate:all:0") as job:
        job.start_all().until("step", 1, step=1)
        job.supervisors[1].send_signal(signal.SIGTERM)
        assert job.wait() == [75, 75], job.said()
        assert [note["saved"] for note in job.notes("stopped")] == [False, False]
        assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("fault", "kind", "last", "stopped"),
    [("compile:all:0", "compiling", 0, []), ("data:all:13", "waiting", 12, [(12, True)] * 2)],
)
def test_sigterm_is_heard_in_a_compilation_and_while_all_wait_for_data(
    fault: str, kind: str, last: int, stopped: list[tuple[int, bool]], tmp_path: Path
) -> None:
    """Of all hosts. One that has begun a step waits for the others, whose compilation then has to end first."""
    with PatientJob(tmp_path, 2, steps=STEPS, fault=fault) as job:
        job.start_all()
        for host in (0, 1):
            job.until(kind, host)
        job.supervisors[1].send_signal(signal.SIGTERM)
        assert job.wait() == [75, 75], job.said()
        assert CUT_OFF not in job.said()
        assert max((note["step"] for note in job.notes("step")), default=0) == last
        assert [(note["step"], note["saved"]) for note in job.notes("stopped")] == stopped


def test_a_step_that_cannot_end_is_left_when_the_grace_ends(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=STEPS, fault="data:1:13", limits={"grace": 2}) as job:
        job.start_all().until("waiting", 1)
        job.until("begun", 0, step=13)
        job.supervisors[1].send_signal(signal.SIGTERM)
        assert job.wait() == [75, 75], job.said()
        assert CUT_OFF in job.said(1)
        assert json.loads((tmp_path / "saved").read_text())[0] == 10


def test_a_worker_dies_with_its_supervisor_and_the_others_wait_for_it(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 3, steps=STEPS, fault=SLOW) as job:
        job.start_all().until("step", 1, step=12)
        job.supervisors[1].kill()
        job.supervisors[1].wait()
        assert gone(job.pid(1))
        assert gone(job.pid(2))
        job.start(1)
        finished_exactly(job)
        assert "lost host 1" in job.said(0)


def test_the_leader_may_die_and_come_back(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 3, steps=STEPS, fault=SLOW) as job:
        job.start_all().until("step", 1, step=12)
        job.supervisors[0].kill()
        job.supervisors[0].wait()
        assert gone(job.pid(0))
        assert gone(job.pid(2)), "a worker went on without the leader"
        job.start(0)
        finished_exactly(job)
        assert "lost the leader" in job.said(2)
        assert [line["attempt"] for line in job.log("start")] == [1, 2]


def test_a_host_that_freezes_is_lost_and_wakes_up_too_late(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 2, steps=STEPS, fault=SLOW, limits={"lost": 12.0}) as job:
        job.start_all().until("step", 1, step=12)
        worker, supervisor = job.pid(1), job.supervisors[1]
        supervisor.send_signal(signal.SIGSTOP)
        os.kill(worker, signal.SIGSTOP)
        assert gone(job.pid(0)), "the others must not wait for a frozen host"
        frozen_at = job.notes("step", 1, attempt=1)[-1]["step"]
        os.kill(worker, signal.SIGCONT)
        supervisor.send_signal(signal.SIGCONT)
        finished_exactly(job)
        assert gone(worker)
        assert job.notes("step", 1, attempt=1)[-1]["step"] <= frozen_at + 1, "the answer to a step may have come before"


def test_one_host_alone_is_restarted_too(tmp_path: Path) -> None:
    with PatientJob(tmp_path, 1, steps=STEPS, fault="segv:0:13") as job:
        job.start(0, port=0)
        finished_exactly(job)
        assert "SIGSEGV" in job.said(0)
