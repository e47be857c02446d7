"""The record of a cloud run in a folder: what is created once, what is replaced, and damaged files."""

from pathlib import Path

import pytest

from forerun.cloud.record.entries import AttemptEntry, CloudRun, EndEntry, HostEntry, Option, ReadyEntry, StopEntry
from forerun.cloud.record.read_entry import DamagedEntry, write_entry
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


def test_keys_of_newer_files_are_ignored(files: RunFiles) -> None:
    files.files.create("stop.json", b'{"at": 1.0, "reason": "user", "added later": 1}')
    assert files.stop() == StopEntry(1.0, "user")


def test_damaged_files_do_not_hide_the_others(files: RunFiles) -> None:
    for number in (1, 2, 3):
        files.create_attempt(AttemptEntry(number, OPTION, f"forerun-tiny-{number}", 1000.0, 3600, 0.0))
        files.report_host(HostEntry(3, number, 1005.0, "training"))
    files.files.replace("attempts/002.json", b"[" * 100_000)
    files.files.replace("attempts/0004.json", b"no file of a record")
    files.files.replace("attempts/000.json", b"no file of a record")
    files.files.replace("hosts/003-02.json", b"\xff")
    attempts, hosts = files.attempts(), files.hosts(3, 4)
    assert [type(attempts[number]) for number in (1, 2, 3)] == [AttemptEntry, DamagedEntry, AttemptEntry]
    assert files.attempt(2) == attempts[2]
    assert list(attempts) == [1, 2, 3]
    assert {host: type(entry) for host, entry in hosts.items()} == {1: HostEntry, 2: DamagedEntry, 3: HostEntry}
    assert damaged_path(hosts[2]) == f"{files.address}/cloud/hosts/003-02.json"


def test_an_entry_in_the_file_of_another_is_damaged(files: RunFiles) -> None:
    files.files.replace("attempts/002.json", write_entry(AttemptEntry(1, OPTION, "a", 1000.0, 3600, 0.0)))
    files.files.replace("hosts/002-00.json", write_entry(HostEntry(1, 0, 1000.0, "training")))
    files.files.replace("hosts/002-01.json", write_entry(HostEntry(2, 0, 1000.0, "training")))
    assert damaged_path(files.attempts()[2]) == f"{files.address}/cloud/attempts/002.json"
    assert set(map(type, files.hosts(2, 2).values())) == {DamagedEntry}


def test_a_folder_in_the_place_of_a_file_is_damaged(files: RunFiles, tmp_path: Path) -> None:
    files.report_host(HostEntry(1, 0, 1000.0, "training"))
    (tmp_path / "cloud/hosts/001-01.json").mkdir()
    assert list(map(type, files.hosts(1, 2).values())) == [HostEntry, DamagedEntry]


def test_a_damaged_time_does_not_replace_the_own_one(files: RunFiles) -> None:
    files.files.create("attempts/001-ready.json", b'{"at": "x"}')
    files.files.create("attempts/001-end.json", b'{"at": 1, "reason": "finished", "usd": NaN}')
    assert files.create_ready(1, ReadyEntry(1010.0)) == ReadyEntry(1010.0)
    assert files.create_end(1, EndEntry(2000.0, "preempted", 1.25)).usd == 1.25


def damaged_path(entry: object) -> str:
    assert isinstance(entry, DamagedEntry)
    return entry.path
