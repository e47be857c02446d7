"""An agent with its threads, a `systemctl` and a `forerun` that record their calls."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_host import LIMIT_SECONDS, Host

from forerun.cloud.record.entries import FinishEntry, HostEntry, ReadyEntry, StopEntry
from forerun.cloud.record.host_log import LogReader


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_reports_progress_and_copies_logs(host: Host) -> None:
    hosts = [{"index": 0, "step": 7, "save_seconds": 2.5}, {"index": 1, "step": 6, "save_seconds": 3.5}]
    (host.run / "hosts.json").write_text(json.dumps({"hosts": hosts}))
    (host.run / "program.json").write_text(json.dumps({"program": "0123456789ab"}))
    log = host.layout.log_folder / "train.log"
    log.write_bytes(b"step 1\nstep 2\nst")
    with host.running():
        wait_for(lambda: host.phase() == "training")
        wait_for(lambda: content(host))
        report = host.report()
        assert report is not None
        assert (report.step, report.save_seconds, report.program) == (7, 3.5, "0123456789ab")
        assert 1010.0 <= report.at < 1040.0
        log.write_bytes(b"step 1\nstep 2\nstep 3\n")
        wait_for(lambda: b"step 3" in content(host))
    assert content(host) == b"step 1\nstep 2\nstep 3\n"
    assert host.api.deleted == []


def test_a_new_agent_continues_the_log(host: Host) -> None:
    """The position of the first agent is lost after its first part, as by a kill between the part and its record."""
    log = host.layout.log_folder / "train.log"
    log.write_bytes(b"one\n")
    with host.running():
        wait_for(lambda: content(host) == b"one\n")
    host.layout.log_position.unlink()
    log.write_bytes(b"one\ntwo\n")
    with host.running():
        wait_for(lambda: b"two" in content(host))
    assert content(host) == b"one\ntwo\n"


def content(host: Host) -> bytes:
    return LogReader(host.files, 1, 0).read()


def test_stop_request_saves_and_deletes(host: Host) -> None:
    with host.running():
        wait_for(lambda: host.phase() == "starting")
        host.files.request_stop(StopEntry(1011.0, "user"))
        wait_for(lambda: host.api.deleted)
    assert host.api.deleted[0] == ("forerun-tiny-1", "us-east5-b")
    assert host.calls.read_text().split() == ["stop", "--no-block", "forerun-train.service"]
    report = host.report()
    assert report is not None
    assert (report.phase, report.exit_code, report.detail) == ("stopped", 75, "stop: user")


def test_deadline_stops_and_deletes_without_a_controller(host: Host) -> None:
    """Nothing but the agent acts here: the acceptance of the limit on the host."""
    with host.running():
        wait_for(lambda: host.phase() == "starting")
        assert not host.calls.exists()
        host.api.time = 1000.0 + LIMIT_SECONDS - 60.0
        wait_for(lambda: host.api.deleted)
    assert host.calls.exists()
    report = host.report()
    assert report is not None
    assert report.phase == "stopped"
    assert report.detail.startswith("budget")


def test_deadline_deletes_although_training_does_not_stop(host: Host) -> None:
    host.checkpoint.unlink()  # the service ignores the request to stop
    host.api.fails = 2
    host.api.time = 1000.0 + LIMIT_SECONDS - 29.0
    with host.running():
        wait_for(lambda: host.api.deleted)


def test_deadline_holds_while_the_api_and_the_bucket_are_down(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent knows the deadline from its first exchange, and counts on its own clock while the API is down."""
    with host.running() as agent:
        wait_for(lambda: host.phase() == "starting")
        host.api.time = 1000.0 + LIMIT_SECONDS - 61.0
        wait_for(lambda: agent.view().now >= host.api.time)
        host.api.is_down = True
        monkeypatch.setattr(host.files, "report_host", lambda entry: (_ for _ in ()).throw(OSError("down")))
        monkeypatch.setattr(host.files, "stop", lambda: (_ for _ in ()).throw(OSError("down")))
        wait_for(lambda: host.api.deleted)
    assert host.calls.exists()


def test_the_agent_records_the_start_of_billing(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.files.files.remove("attempts/001-ready.json")
    with host.running():
        wait_for(lambda: host.files.ready(1) == ReadyEntry(1000.0))


def test_finish_exports_stores_and_deletes(host: Host) -> None:
    (host.run / "summary.json").write_bytes(b'{"steps": 3}')
    host.end_training(0)
    with host.running(hosts=2):
        wait_for(lambda: host.files.finished())
        wait_for(lambda: host.phase() in ("exporting", "finished"))
        host.files.report_host(HostEntry(1, 1, 1012.0, "finished"))
        wait_for(lambda: host.api.deleted)
    assert host.calls.read_text().split() == ["cpu", "export", str(host.run), "--to", str(host.layout.export)]
    entry = host.files.finished()
    assert entry is not None
    expected = {
        "export/model.safetensors": b"weights",
        "export/sub/config.json": b"{}",
        "cloud/run/summary.json": b'{"steps": 3}',
    }
    assert entry.files == {name: (len(text), hashlib.sha256(text).hexdigest()) for name, text in expected.items()}
    for name, text in expected.items():
        assert host.files.run_folder.read(name) == text
    assert host.phase() == "finished"


def test_a_run_whose_export_fails_is_finished_with_a_note(host: Host) -> None:
    host.layout.forerun.write_text("#!/bin/sh\nexit 3\n")
    host.end_training(0)
    with host.running():
        wait_for(lambda: host.api.deleted)
    report, entry = host.report(), host.files.finished()
    assert report is not None
    assert entry is not None
    assert report.phase == "finished"
    assert "exit code 3" in report.detail
    assert entry.files == {}


def test_the_deadline_ends_an_export(host: Host) -> None:
    host.layout.forerun.write_text(f"#!/bin/sh\necho $$ > {host.calls}\nexec sleep 600\n")
    host.end_training(0)
    with host.running():
        wait_for(lambda: host.calls.exists() and host.calls.read_text().strip())
        host.api.time = 1000.0 + LIMIT_SECONDS - 60.0
        wait_for(lambda: host.api.deleted)
        assert host.files.finished() is None
        report = host.report()
        assert report is not None
        assert report.detail.startswith("budget")
    assert not Path(f"/proc/{host.calls.read_text().strip()}/exe").exists()


def test_results_are_never_replaced_by_a_second_finish(host: Host) -> None:
    before = FinishEntry(1005.0, 1, {"export/x": (1, "00")})
    host.files.create_finished(before)
    host.end_training(0)
    with host.running():
        wait_for(lambda: host.api.deleted)
    assert host.files.finished() == before
    assert not host.calls.exists()


def test_other_hosts_leave_the_deletion_to_host_0(host: Host) -> None:
    host.end_training(0)
    with host.running(host=1, hosts=2):
        wait_for(lambda: host.phase(1) == "exporting")
        host.files.create_finished(FinishEntry(1005.0, 1, {}))
        wait_for(lambda: host.phase(1) == "finished")
        assert host.api.deleted == []


def test_notice_is_reported(host: Host) -> None:
    with host.running(notice="the cloud preempts this machine"):
        wait_for(lambda: host.phase() == "preempting")
    assert host.api.deleted == []


def test_agent_of_users_machines_ends_after_training(host: Host) -> None:
    host.end_training(2)
    assert host.agent(is_rented=False).run() == 0
    report = host.report()
    assert report is not None
    assert (report.phase, report.exit_code) == ("failed", 2)
