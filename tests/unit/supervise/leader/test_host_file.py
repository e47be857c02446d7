"""The file hosts.json: its values, and a leader that neither waits for it nor fails with it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from forerun.supervise.host_address import Hosts
from forerun.supervise.leader.leader import EVERY_SECONDS, HostFile, hosts_content, replace_file
from forerun.supervise.leader.leader_view import HostJoined, LeaderView, MessageReceived, update
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Hello, HostBeat, WorkerView


def view_of(*steps: int) -> LeaderView:
    """The leader of hosts that have reported these steps at the times 100, 101 ..."""
    view = LeaderView.at_start(Hosts(0, len(steps), port=1), Limits(), 0, "", 0.0)
    for index, step in enumerate(steps):
        now = 100.0 + index
        view = update(view, HostJoined(Hello(index, len(steps), "i", f"vm-{index}", 7, {})), now)
        seen = WorkerView("step", step, memory="HBM", memory_bytes=10 + index, memory_limit_bytes=64, save_seconds=2.0)
        view = update(view, MessageReceived(index, HostBeat(view.attempt, seen, {})), now)
    return view


def test_each_host_has_its_step_lag_memory_and_age() -> None:
    content = hosts_content(view_of(12, 9), now=105.0, unix_seconds=1000.0)
    assert content["unix_seconds"] == 1000.0
    keys = ("name", "step", "lag", "save_seconds", "memory", "memory_bytes", "memory_limit_bytes", "age_seconds")
    assert [[host[key] for key in keys] for host in content["hosts"]] == [
        ["vm-0", 12, 0, 2.0, "HBM", 10, 64, 5.0],
        ["vm-1", 9, 3, 2.0, "HBM", 11, 64, 4.0],
    ]


def test_the_file_is_not_written_more_often_than_every_two_seconds(tmp_path: Path) -> None:
    written: list[str] = []
    one = threading.Semaphore(0)

    def write(path: Path, text: str) -> None:
        written.append(text)
        one.release()

    file = HostFile(tmp_path, write)
    for now in (0.0, 0.5 * EVERY_SECONDS, 0.9 * EVERY_SECONDS):
        file.update(view_of(1), now)
    assert one.acquire(timeout=60)
    file.update(view_of(2), EVERY_SECONDS)
    assert one.acquire(timeout=60)
    file.close(view_of(3), 1.1 * EVERY_SECONDS)
    assert [json.loads(text)["hosts"][0]["step"] for text in written] == [1, 2, 3]


def test_a_disk_that_fails_or_hangs_does_not_reach_the_leader(tmp_path: Path) -> None:
    failed = threading.Event()

    def fail(path: Path, text: str) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    file = HostFile(tmp_path, fail)
    file.update(view_of(1), 0.0)
    assert failed.wait(60)
    file.close(view_of(1), 1.0)

    release = threading.Event()

    def hang(path: Path, text: str) -> None:
        release.wait(60)

    hanging = HostFile(tmp_path, hang)
    hanging.update(view_of(1), 0.0)
    hanging.update(view_of(2), 10.0)  # returns although the first write has not ended
    release.set()
    hanging.close(view_of(2), 11.0)


def test_a_reader_never_sees_a_part_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    replace_file(path, "first")
    before = path.stat().st_ino
    replace_file(path, "second")
    assert path.read_text() == "second"
    assert path.stat().st_ino != before
    assert [one.name for one in tmp_path.iterdir()] == ["hosts.json"]
    with pytest.raises(OSError, match="missing"):
        replace_file(tmp_path / "missing" / "hosts.json", "text")
