"""The record of a cloud run in a folder: what is created once, what is replaced, and damaged files."""

from pathlib import Path

import pytest

from forerun.cloud.record.entries import AttemptEntry, CloudRun, EndEntry, HostEntry, Option, ReadyEntry, StopEntry
from forerun.cloud.record.run_files import RunFiles

OPTION = Option("tpu", "v6e-8", "us-east5-b", "spot", 1, 21.6, 0.5, 2.0, "abc")
RUN = CloudRun("tiny", "gs://b/tiny", "name: tiny\n", (OPTION,), 40.0, 1000.0, arguments=("seed=1",))


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(str(tmp_path))


def test_a_run_is_read_as_it_was_written(files: RunFiles) -> None:
    assert files.run() is None
    assert files.create_run(RUN)
    assert files.run() == RUN
    assert files.create_run(RUN)  # the answer to the first try may be lost
    assert not files.create_run(CloudRun("tiny", "gs://b/tiny", "other", (), None, 2.0))
    assert files.run() == RUN


def test_one_controller_claims_an_attempt(files: RunFiles) -> None:
    first = AttemptEntry(1, OPTION, "forerun-tiny-1", 1000.0, 3600, 0.0)
    assert files.create_attempt(first)
    assert not files.create_attempt(AttemptEntry(1, OPTION, "forerun-tiny-1", 1001.0, 3600, 0.0))
    assert files.create_attempt(AttemptEntry(2, OPTION, "forerun-tiny-2", 1002.0, 1800, 20.0))
    files.create_ready(1, ReadyEntry(1010.0))
    assert list(files.attempts()) == [1, 2]
    assert files.attempts()[1] == first


def test_the_first_record_of_a_time_wins(files: RunFiles) -> None:
    assert files.create_ready(1, ReadyEntry(1010.0)).at == 1010.0
    assert files.create_ready(1, ReadyEntry(1020.0)).at == 1010.0
    assert files.create_end(1, EndEntry(2000.0, "preempted", 1.25)).usd == 1.25
    assert files.create_end(1, EndEntry(2001.0, "finished", 1.5)).reason == "preempted"


def test_reports_of_hosts_are_replaced(files: RunFiles) -> None:
    files.report_host(HostEntry(1, 0, 1000.0, "installing"))
    files.report_host(HostEntry(1, 0, 1005.0, "training", step=7))
    files.report_host(HostEntry(2, 1, 1005.0, "training", step=9))
    assert files.hosts(1, 4) == {0: HostEntry(1, 0, 1005.0, "training", step=7)}


def test_a_stop_is_withdrawn(files: RunFiles) -> None:
    files.request_stop(StopEntry(1.0, "user"))
    assert files.stop() == StopEntry(1.0, "user")
    files.withdraw_stop()
    assert files.stop() is None


def test_logs_in_order(files: RunFiles) -> None:
    for part in (1, 0, 2):
        files.add_log(1, 0, part, str(part).encode())
    files.add_log(1, 1, 0, b"other host")
    assert [files.files.read(name) for name in files.log_names(1, 0)] == [b"0", b"1", b"2"]


def test_damaged_and_newer_files(files: RunFiles) -> None:
    files.files.create("stop.json", b'{"at": 1.0, "reason": "user", "added later": 1}')
    assert files.stop() == StopEntry(1.0, "user")
    files.files.create("run.json", b'{"name": "tiny"}')
    with pytest.raises(ValueError, match="CloudRun"):
        files.run()
