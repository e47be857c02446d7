"""The supervisors with real jax workers: who is stuck is told from the stacks, and strangers find no open port."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hosts_job import PatientJob

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
        assert "the others wait for it inside jax" in job.said(0)
        assert job.values() == expected


def test_listens_on_one_address_and_stops_at_one_step(tmp_path: Path, expected: dict[int, str]) -> None:
    with PatientJob(tmp_path, 2, kind="jax", steps=100_000) as job:
        job.start_all().until("step", 1, step=12)
        pids = [job.pid(0), job.pid(1), *(child.pid for child in job.supervisors.values())]
        found = sorted(address for pid in pids for address in listened_on(pid))
        assert len(found) >= 2, "the supervisor's and jax's coordinator's"
        assert set(found) == {"127.0.0.1"}
        os.kill(job.pid(1), signal.SIGTERM)
        assert job.wait() == [75, 75], job.said()
        stopped = job.notes("stopped")
        assert len(stopped) == 2
        assert len({note["step"] for note in stopped}) == 1
        values = job.values()
        assert all(values[step] == value for step, value in expected.items() if step in values)


def listened_on(pid: int) -> Iterator[str]:
    """Addresses of the TCP sockets on which a process listens."""
    mine = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since
            mine.add(os.readlink(entry.path))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
                text = socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
                yield text.removeprefix("::ffff:")
