"""The deadline of an agent without a usable record: deterministic, without threads and real time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from agent_host import LIMIT_SECONDS, FailingFolder, Host, SteppedAgent

from forerun.cloud.deadline import DELETE_SECONDS, grace_seconds, host_deadline_at
from forerun.cloud.provider import CloudUnavailable
from forerun.cloud.record.entries import StopEntry

READY_AT = 1000.0  # of the API
# Billing began 10 s before the agent started, and the agent deletes before the deadline. Steps are 10 s.
EXPECTED_SECONDS = LIMIT_SECONDS - 10.0 - DELETE_SECONDS
HOUR = 3600.0


@pytest.fixture
def host(tmp_path: Any) -> Host:
    """Return a host whose training ignores the request to stop: only the deletion ends it."""
    host = Host(tmp_path)
    host.checkpoint.unlink()
    return host


def deny(host: Host, *fragments: str) -> None:
    """Deny all calls of the bucket for files whose names contain one of `fragments`, or for all files."""
    host.files.files = FailingFolder(host.files.files, *(fragments or ("",)))  # type: ignore[assignment]


def assert_deleted_in_time(agent: SteppedAgent, passed: float = 0.0) -> None:
    seconds = agent.seconds_until_deletion(2 * LIMIT_SECONDS)
    assert seconds is not None
    # Training that has ended needs no grace period: then the slice is deleted when it would begin.
    service = agent.agent.view().service
    early_seconds = 10.0 if service is not None and service.is_active else 40.0
    assert EXPECTED_SECONDS - early_seconds <= passed + seconds <= EXPECTED_SECONDS + 10.0


def test_without_any_record_the_delivered_limit_holds(host: Host) -> None:
    deny(host)
    agent = host.stepped()
    assert not agent.step(0.0)
    assert_deleted_in_time(agent)
    assert host.calls.read_text().startswith("stop")


def test_reads_that_hang_do_not_delay_the_deadline(host: Host) -> None:
    """No exchange ever ends: the agent itself reads nothing from the bucket."""
    assert_deleted_in_time(host.stepped())


def test_without_the_record_and_the_api_the_limit_counts_from_the_first_start(host: Host) -> None:
    deny(host)
    agent = host.stepped()
    agent.ask_cloud = False
    seconds = agent.seconds_until_deletion(2 * LIMIT_SECONDS)
    assert seconds == LIMIT_SECONDS - DELETE_SECONDS


def test_the_delivered_deadline_holds_before_the_api_knows_the_start(host: Host) -> None:
    host.api.ready_at = None
    host.files.files.remove("attempts/001-ready.json")
    assert_deleted_in_time(host.stepped(deadline_at=READY_AT + LIMIT_SECONDS))


def test_a_restarted_agent_continues_the_time(host: Host) -> None:
    deny(host)
    host.api.ready_at = None
    passed = 0.0
    for _ in range(3):  # the agent is killed, and starts again after 200 s
        agent = host.stepped()
        for _ in range(80):
            agent.step(10.0)
        host.pass_time(200.0)
        passed += 1000.0
    seconds = host.stepped().seconds_until_deletion(2 * LIMIT_SECONDS)
    assert seconds is not None
    assert abs(passed + seconds - (LIMIT_SECONDS - DELETE_SECONDS)) <= 10.0


def test_the_start_of_billing_survives_a_reboot(host: Host) -> None:
    """After the reboot, neither the API nor the bucket tells when billing began."""
    agent = host.stepped()
    agent.step(1000.0)
    agent.step(20.0)
    deny(host)
    host.api.ready_at = None
    host.pass_time(180.0)
    host.uptime = 60.0  # 120 s passed before the boot
    assert_deleted_in_time(host.stepped(), 1200.0)


def test_a_damaged_state_on_the_disk_does_not_prolong(host: Host) -> None:
    deny(host)
    host.api.ready_at = None
    host.stepped().step(1800.0)
    for content in (b"", b"\xff\x00", b"[" * 100_000, b'{"elapsed_seconds": NaN, "monotonic": 1.0}', b"{}"):
        host.layout.clock.write_bytes(content)
        agent = host.stepped()
        agent.step(0.0)
        deadline = agent.agent.view().deadline_at
        assert deadline is not None
        # The time since the boot counts: 200 s more than the truth.
        assert deadline - agent.agent.view().now == LIMIT_SECONDS - 2000.0
    assert any("agent-clock.json" in line for line in host.said)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("attempts/001.json", b"x"),
        ("attempts/001.json", b"\xff\xfe\x00"),
        ("attempts/001.json", b"[" * 100_000),
        ("attempts/001-ready.json", b"x"),
        ("attempts/001-ready.json", b'{"at": "x"}'),
        ("attempts/001-ready.json", b'{"at": NaN}'),
        ("attempts/001-ready.json", b'{"at": 1e308}'),
        ("attempts/001-ready.json", b'{"at": 2000000000}'),  # forged: it began later
        ("run.json", b"x"),
        ("run.json", b'{"name": 1, "versions": [1, 2]}'),
        ("stop.json", b"x"),
        ("stop.json", b'{"at": 1, "reason": {}}'),
        ("finished.json", b"x"),
        ("hosts/001-00.json", b"x"),
    ],
)
def test_a_damaged_or_forged_file_is_reported_once_and_prolongs_nothing(host: Host, name: str, content: bytes) -> None:
    host.record(name, content)
    agent = host.stepped()
    for _ in range(3):
        assert agent.step()
    report = host.report()
    assert report is not None
    assert (report.phase, report.detail) == ("starting", "")
    is_read = b"2000000000" not in content and not name.startswith(("finished", "hosts"))
    reports = [line for line in host.said if f"{name} is damaged" in line]
    assert len(reports) == (1 if is_read else 0)
    assert_deleted_in_time(agent, 3.0)


@pytest.mark.parametrize("limit", [b"null", b'"x"', b"1000000000000", b"-5", b"300000000"])
def test_a_recorded_limit_never_prolongs(host: Host, limit: bytes) -> None:
    content = host.files.files.read("attempts/001.json")
    host.record("attempts/001.json", content.replace(b"3600", limit))
    agent = host.stepped()
    agent.step()
    assert_deleted_in_time(agent, 1.0)


def test_a_record_can_shorten(host: Host) -> None:
    content = host.files.files.read("attempts/001.json")
    host.record("attempts/001.json", content.replace(b"3600", b"1800"))
    agent = host.stepped()
    agent.step()
    seconds = agent.seconds_until_deletion(LIMIT_SECONDS)
    assert seconds is not None
    assert abs(seconds - (EXPECTED_SECONDS - 1800.0)) <= 11.0


def test_one_damaged_file_hides_no_stop_request(host: Host) -> None:
    for name in ("attempts/001.json", "run.json", "attempts/001-ready.json", "hosts/001-00.json", "finished.json"):
        host.record(name, b"\xff")
    host.files.request_stop(StopEntry(1011.0, "user"))
    agent = host.stepped()
    agent.step()
    agent.step()
    assert agent.agent.view().stop_reason == "user"
    assert host.calls.read_text().startswith("stop")


def test_a_call_that_fails_hides_no_other(host: Host) -> None:
    deny(host, "attempts", "run.json", "logs")
    host.files.files.create("stop.json", b'{"at": 1011.0, "reason": "user"}')
    agent = host.stepped()
    for _ in range(3):
        assert not agent.step()
    report = host.report()
    assert report is not None
    assert report.detail == "stop: user"
    problems = [line for line in host.said if "PermissionError" in line]
    assert len(problems) == len(set(problems)) == 2


def test_the_start_of_billing_is_recorded_without_an_attempt(host: Host) -> None:
    for name in ("attempts/001.json", "attempts/001-ready.json"):
        host.files.files.remove(name)
    agent = host.stepped()
    agent.step()
    agent.step()
    entry = host.files.ready(1)
    assert getattr(entry, "at", None) == READY_AT


def test_an_absurd_start_of_billing_is_not_used(host: Host) -> None:
    host.files.files.remove("attempts/001-ready.json")
    for ready_at in (0.0, math.nan, 1e12, math.inf, -1e12):
        host.api.ready_at = ready_at
        host.api.time = host.wall = 1_700_000_000.0
        agent = host.stepped()
        agent.step()
        view = agent.agent.view()
        assert view.deadline_at == view.now + LIMIT_SECONDS - 1.0
        host.layout.clock.unlink()


@pytest.mark.parametrize(
    "hosts",
    [
        f'{{"hosts": [{{"index": 0, "step": 1, "save_seconds": {value}}}]}}'
        for value in ("1e308", "-1e9", "NaN", "Infinity", "true", '"5"', "1" + "0" * 400)
    ]
    + ['{"hosts": ["a"]}', '{"hosts": 5}', "[" * 100_000, '{"hosts": [{"index": 0, "step": -1e400}]}', "\x00"],
)
def test_progress_does_not_move_the_deadline(host: Host, hosts: str) -> None:
    (host.run / "hosts.json").write_text(hosts)
    (host.run / "program.json").write_text(hosts)
    agent = host.stepped()
    agent.step()
    assert agent.agent.view().progress.save_seconds is None
    while agent.agent.view().now < READY_AT + LIMIT_SECONDS - 70.0:
        agent.step(10.0)
    assert not host.calls.exists()
    agent.step(20.0)
    assert host.calls.exists()
    assert_deleted_in_time(agent, agent.agent.view().now - 1010.0)


def test_a_credible_time_of_a_save_counts() -> None:
    assert grace_seconds(100.0) == 210.0
    assert grace_seconds(math.nan) == grace_seconds(-1e9) == grace_seconds(1e308) == grace_seconds(None) == 60.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda host: host.layout.setup_state.write_bytes(b"\xff\xfe\0"),
        lambda host: host.layout.setup_state.write_bytes(b"x" * 5_000_000),
        lambda host: host.unit.write_bytes(b"\xff\xfe\0=\xff"),
        lambda host: host.unit.write_bytes(b"ActiveState=failed\nExecMainCode=1\nExecMainStatus=" + b"9" * 5000),
        lambda host: host.layout.log_position.write_text('{"part":-1,"offsets":{"train.log":-5}}'),
        lambda host: host.layout.log_position.write_text('{"part":true,"offsets":[["train.log", 1e400]]}'),
        lambda host: host.layout.log_position.write_text("[" * 100_000),
    ],
)
def test_damaged_files_of_the_host_change_nothing(host: Host, damage: Callable[[Host], object]) -> None:
    log = host.layout.log_folder / "train.log"
    log.write_bytes(b"step 1\n")
    damage(host)
    agent = host.stepped(has_systemctl=True)
    for _ in range(3):
        assert agent.step()
    assert host.phase() in ("starting", "installing")
    assert "logs/001-00/000000.log" in host.files.files.files()
    agent.step(EXPECTED_SECONDS)
    assert host.api.deleted


def test_a_defect_of_the_agent_does_not_delay_the_deadline(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(view: object) -> Any:
        raise ZeroDivisionError

    agent = host.stepped()
    agent.step()
    monkeypatch.setattr("forerun.cloud.host.agent.decide", fail)
    assert_deleted_in_time(agent, 1.0)
    assert len([line for line in host.said if "ZeroDivisionError" in line]) == 1


def test_a_bucket_that_does_not_answer_does_not_delay_the_deletion(host: Host) -> None:
    """The flush before the deletion ends 10 s before the deadline, as far as the last turn was in time."""
    waits: list[float] = []
    agent = host.stepped()
    agent.step()
    agent.agent._link.flush = lambda limit_seconds: bool(waits.append(limit_seconds))  # type: ignore[method-assign]
    agent.step(EXPECTED_SECONDS)
    agent.agent._delete_asked = float("-inf")
    agent.step(25.0)
    assert waits == [pytest.approx(19.0, abs=1.0), 0.0]


def test_the_export_is_cancelled_before_the_deletion(host: Host) -> None:
    """An export that runs during the deletion could write to the bucket while another attempt does."""
    order: list[str] = []
    agent = host.stepped()
    delete, cancel = host.api.delete, agent.agent._results.cancel
    host.api.delete = lambda *args: (order.append("delete"), delete(*args))[1]  # type: ignore[method-assign]
    agent.agent._results.cancel = lambda: (order.append("cancel"), cancel())[1]  # type: ignore[method-assign]
    assert_deleted_in_time(agent)
    assert order[:2] == ["cancel", "delete"]


def test_the_export_and_the_notice_may_fail(host: Host) -> None:
    host.end_training(0)
    host.layout.forerun.unlink()  # it cannot be started
    agent = host.stepped()
    agent.step()
    agent.step(20.0)
    assert not host.api.deleted
    assert any(line.startswith("results: FileNotFoundError") for line in host.said)
    assert_deleted_in_time(agent, 21.0)


def test_deletions_are_repeated(host: Host) -> None:
    host.api.fails = 3
    agent = host.stepped()
    agent.step()
    agent.step(EXPECTED_SECONDS)
    for _ in range(40):
        agent.step(1.0, exchange=False)
    assert len([line for line in host.said if "CloudUnavailable" in line]) == 3
    assert host.api.deleted


def test_the_api_may_fail_in_any_way(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Any:
        raise CloudUnavailable("down")

    agent = host.stepped()
    for name in ("now", "status"):
        monkeypatch.setattr(host.api, name, fail)
    seconds = agent.seconds_until_deletion(2 * LIMIT_SECONDS)
    # The record tells when billing began, and the machine's own clock is right.
    assert seconds is not None
    host.layout.clock.unlink()


def test_no_value_moves_the_deadline_of_another_one_back() -> None:
    values: list[float | None] = [None, 0.0, 900.0, 5000.0, 1e12, math.nan, math.inf]
    for ready_at in values:
        for limit in values:
            deadline = host_deadline_at(1010.0, 10.0, 4600.0, (1000.0, ready_at), (3600, limit))
            assert deadline is not None
            assert deadline <= 4600.0
    assert host_deadline_at(None, 10.0, 4600.0, (1000.0, None), (3600, None)) == 3590.0
    assert host_deadline_at(1010.0, 10.0, None, (1000.0, None), (None, None)) is None


def test_settings_without_a_limit_have_no_deadline(host: Host) -> None:
    for name in ("attempts/001.json", "attempts/001-ready.json"):
        host.files.files.remove(name)
    agent = host.stepped(limit_seconds=None)
    assert agent.seconds_until_deletion(100 * HOUR, 600.0) is None
    assert json.loads(host.layout.clock.read_bytes())["elapsed_seconds"] > 99 * HOUR
