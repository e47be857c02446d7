"""Tests of two hosts that train one real job: whatever happens, the result equals that of the undisturbed run.

A bit that flips on one host takes three hosts and minutes: `python tests/faults/matrix.py --only flip` tests it, with
its result in docs/explanation/faults.md.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from hosts_job import listened_on
from runs import Bench, Outcome, children
from runs_hosts import EVERY, STOPPED, HostsRun, announced, reference, strike, struck

pytestmark = pytest.mark.timing

HOSTS, STEPS = 2, 40
INTRUDER = """
import sys
from jax._src.lib import _jax
client = _jax.get_distributed_runtime_client(
    sys.argv[1], 1, init_timeout=5, shutdown_timeout=1, heartbeat_timeout=10, use_compression=True
)
client.connect()
print("joined")
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("hosts") / "bench", steps=STEPS, every=EVERY)


@pytest.fixture(scope="module")
def expected(bench: Bench) -> Outcome:
    return reference(bench, HOSTS)


@pytest.mark.slow
def test_a_process_without_the_secret_cannot_join_the_coordinator(bench: Bench, expected: Outcome) -> None:
    """It tries every TCP port of the run with jax's own client, under the number of a host."""
    with HostsRun(bench, "intruder", HOSTS) as job:
        with bench.held_back(EVERY + 5, STEPS, step_seconds=3.0):  # so that the run lasts longer than the attack
            job.start_all().until_step(EVERY + 3)
            supervisors = [child.pid for child in job.supervisors.values()]
            pids = {*supervisors, *(child for pid in supervisors for child in children(pid))}
            places = {place for pid in pids for place in listened_on(pid)}
            assert ("127.0.0.1", job.port) in places
            intruders = [
                subprocess.Popen(
                    [sys.executable, "-c", INTRUDER, f"{address}:{port}"],
                    env={name: value for name, value in bench.environment.items() if "proxy" not in name.lower()},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                for address, port in places
            ]
            said = [intruder.communicate(timeout=300)[0] for intruder in intruders]
            assert job.run.last_step() < STEPS, "the run was over before the attack"
            assert said == [""] * len(places)
        assert job.wait() == [0, 0], job.said()
        assert len(job.log("start")) == 1, job.log("cause", "fault")
        assert expected.differs_in(job.run.outcome()) == []


def test_a_killed_host_and_an_announced_stop_change_nothing(bench: Bench, expected: Outcome) -> None:
    with HostsRun(bench, "struck", HOSTS) as job:
        # Its last steps take a minute, should the kill, and then the signal, be late.
        with bench.held_back(EVERY + 5, STEPS, step_seconds=2.0):
            job.start_all().until_step(EVERY + 3)
            killed = struck(job, "kill", 1)
            assert killed["ok"], killed
            bench.brake(2 * EVERY + 6, STEPS, step_seconds=2.0)
            job.until_step(2 * EVERY + 4)
            stopped = announced(job, "sigterm", 0)
            assert stopped["ok"], stopped
        assert job.wait() == [0, 0], job.said()
        assert expected.differs_in(job.run.outcome()) == []
        assert job.said_file(1).read_text().count("loss") == 0, "one host speaks for all"


@pytest.mark.slow
def test_a_save_that_takes_longer_than_the_grace_time_is_refused(bench: Bench) -> None:
    """The leader knows the time from the worker of `forerun train`. The save of step 5 ends before that of step 10."""
    with (
        HostsRun(bench, "refused", 1) as job,
        bench.held_back(2 * EVERY + 4, STEPS, step_seconds=2.0, saved_seconds=3600.0),
    ):
        job.start_all().until_step(2 * EVERY + 2)
        strike("sigterm", job, 0)
        assert job.wait() == [STOPPED], job.said()
        [agreed] = job.log("agreed")
        assert agreed["remaining_seconds"] > 1.0, "without a time of a save, the leader would have approved it"
        assert agreed["save"] is False
        assert job.run.newest() == job.run.last_step() // EVERY * EVERY, "only the saves of the schedule exist"
