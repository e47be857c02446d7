"""`forerun ps` and `forerun down` with damaged, missing and slow records: every run is listed and deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_mutations import ENTRIES, OPTION, mutated_contents
from recorded_cloud import ListedProvider
from rich.console import Console
from simulated_cloud import SimulatedCloud, SimulatedSlice

from forerun.cli.cloud import end_runs as down
from forerun.cli.cloud.show_runs import table
from forerun.cli.main import main
from forerun.cloud import labels
from forerun.cloud.provider import SliceRequest, SliceState
from forerun.cloud.record.entries import (
    AttemptEntry,
    CloudRun,
    HostEntry,
    LeaseEntry,
    ReadyEntry,
    StopEntry,
)
from forerun.cloud.record.read_entry import DamagedEntry, write_entry
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.view import removal
from forerun.cloud.view.project_state import ProjectState, bounded_calls, read_project
from forerun.cloud.view.removal import RemovalResult, removal_targets, resources_of, snapshots_of, take_down
from forerun.cloud.view.run_rows import CloudRow, rows_of, state_of_run
from forerun.cloud.view.snapshot import RecordSnapshot, read_snapshot
from forerun.reporter import SILENT

NOW = 100.0
NAMES = (
    "run.json",
    "attempts/001.json",
    "attempts/001-ready.json",
    "attempts/001-end.json",
    "hosts/001-00.json",
    "stop.json",
    "finished.json",
    "controller.json",
)
FILES = dict(zip(NAMES, map(write_entry, ENTRIES), strict=True))
VALID = ("run.json", "attempts/001.json", "attempts/001-ready.json", "hosts/001-00.json", "controller.json")


@pytest.fixture(scope="module", autouse=True)
def _fast_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)
        yield


def cloud_with(folder: Path, **contents: bytes) -> SimulatedCloud:
    """Return a cloud with the slices of the runs `good` and `bad`. Write the record of each; `bad` has `contents`."""
    shutil.rmtree(folder, ignore_errors=True)
    cloud = SimulatedCloud({"v6e-8": 10.0}, now=NOW)
    for name in ("good", "bad"):
        files = {key: FILES[key].replace(b"bad", name.encode()) for key in VALID}
        for key, content in {**files, **(contents if name == "bad" else {})}.items():
            (folder / name / "cloud" / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / "cloud" / key).write_bytes(content)
        metadata = {labels.FOLDER: str(folder / name), labels.USD_PER_HOUR: "10", labels.MAX_USD: "40"}
        request = SliceRequest(
            f"forerun-{name}-1", "v6e-8", "us-east1-d", "spot", labels.slice_labels(name, 1), metadata, "id"
        )
        cloud.slices[request.name, request.zone] = SimulatedSlice(request, 1, SliceState.READY, 10.0)
    return cloud


def project_of(cloud: SimulatedCloud, folder: Path, seconds: float = 60.0) -> ProjectState:
    return read_project(lambda: [ListedProvider(cloud)], [str(folder / "good"), str(folder / "bad")], NOW, seconds)


def shown(project: ProjectState) -> tuple[CloudRow, ...]:
    """Return the rows, after they were rendered."""
    rows = rows_of(project.resources, project.snapshots, NOW)
    with open(os.devnull, "w") as sink:
        Console(file=sink, width=200).print(table(rows, NOW, 200))
    for snapshot in project.snapshots.values():
        state_of_run(snapshot, NOW)
    return rows


def delete_all(cloud: SimulatedCloud, project: ProjectState) -> RemovalResult:
    chosen = resources_of(None, project.resources)
    damaged = [folder for folder, why in project.unread.items() if isinstance(why, DamagedEntry)]
    snapshots = snapshots_of(None, chosen, project.snapshots)
    provider = ListedProvider(cloud)
    return take_down(removal_targets(chosen), snapshots, {"tpu": provider}, NOW, SILENT, damaged)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "project"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_no_damage_hides_a_run_or_stops_a_deletion(folder: Path, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    cloud = cloud_with(folder, **{name: data.draw(mutated_contents(FILES[name])) for name in names})
    values = st.sampled_from(("", "zzz", "nan", "-1", "1e999", "9" * 5000, "\x1b[2J", "٣"))
    request = cloud.slices["forerun-bad-1", "us-east1-d"].request
    for mapping, keys in ((request.labels, (labels.ATTEMPT, labels.ROLE)), (request.metadata, (labels.USD_PER_HOUR,))):
        for key in keys:
            if data.draw(st.booleans()):
                mapping[key] = data.draw(values)  # type: ignore[index]
    project = project_of(cloud, folder)
    rows = shown(project)
    assert [row.run for row in rows] == ["bad", "good"]
    good = rows[1]
    assert (good.state, good.step, good.usd) == ("training", 3, pytest.approx(0.25))
    delete_all(cloud, project)
    assert cloud.slices == {}


@pytest.mark.parametrize(
    ("name", "content", "state"),
    [
        ("hosts/001-00.json", b'{"attempt": 1, "host": 0, "phase": "training", "at": "x"}', "damaged record"),
        ("attempts/001-ready.json", b'{"at": NaN}', "damaged record"),
        ("controller.json", b'{"holder": "\\u001b[2J", "until": 1}', "damaged record"),
        ("run.json", b"[" * 100_000, "ready"),
    ],
)
def test_damage_is_shown_with_its_file(folder: Path, name: str, content: bytes, state: str) -> None:
    project = project_of(cloud_with(folder, **{name: content}), folder)
    assert [row.state for row in shown(project)] == [state, "training"]
    damaged = [entry for one in project.snapshots.values() for entry in one.damaged]
    damaged += [why for why in project.unread.values() if isinstance(why, DamagedEntry)]
    assert [entry.path for entry in damaged] == [f"{folder}/bad/cloud/{name}"]


def test_a_damaged_run_without_resources_is_not_over(folder: Path) -> None:
    cloud_with(folder, **{"attempts/001-end.json": b"{}", "stop.json": FILES["stop.json"]})
    snapshot = read_snapshot(RunFiles(str(folder / "bad")))
    assert isinstance(snapshot, RecordSnapshot)
    assert (snapshot.is_over, state_of_run(snapshot, NOW)) == (False, "damaged record")


def test_a_forged_attempt_does_not_delete_another_machine(folder: Path) -> None:
    forged = AttemptEntry(2, OPTION, "forerun-good-1", 1.0, 1800, 0.0)
    cloud = cloud_with(folder, **{"attempts/002.json": write_entry(forged)})
    project = project_of(cloud, folder)
    chosen = resources_of("bad", project.resources)
    snapshots = snapshots_of("bad", chosen, project.snapshots)
    take_down(removal_targets(chosen), snapshots, {"tpu": ListedProvider(cloud)}, NOW, SILENT)
    assert list(cloud.slices) == [("forerun-good-1", "us-east1-d")]


def test_a_forged_name_in_a_record_does_not_rename_a_resource(folder: Path) -> None:
    run = CloudRun("good", "gs://b/x", "", (OPTION,), 40.0, 1.0)
    project = project_of(cloud_with(folder, **{"run.json": write_entry(run)}), folder)
    assert [row.run for row in shown(project)] == ["bad", "good"]


def test_a_deletion_stops_a_run_with_a_damaged_record_too(folder: Path) -> None:
    cloud = cloud_with(folder, **{"run.json": b"{}", "stop.json": b"x"})
    result = delete_all(cloud, project_of(cloud, folder))
    assert RunFiles(str(folder / "bad")).stop() == StopEntry(NOW, "forerun down")
    assert (cloud.slices, result.failed, result.unrecorded) == ({}, {}, {})


def test_a_record_that_never_answers_delays_nothing_for_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = cloud_with(folder)
    (folder / "bad/cloud/controller.json").unlink()
    os.mkfifo(folder / "bad/cloud/controller.json")  # a read waits for a writer, for ever
    project = project_of(cloud, folder, seconds=0.5)
    assert list(project.unread) == [str(folder / "bad")]
    assert len(shown(project)) == 2
    monkeypatch.setattr(removal, "STOP_SECONDS", 0.5)
    (folder / "good/cloud/stop.json").unlink(missing_ok=True)
    delete_all(cloud, project)
    assert cloud.slices == {}


def test_a_folder_that_cannot_be_read_does_not_end_the_others(folder: Path) -> None:
    cloud = cloud_with(folder)
    shutil.rmtree(folder / "bad")
    project = project_of(cloud, folder)
    assert list(project.unread) == [str(folder / "bad")]
    assert len(shown(project)) == 2
    (folder / "bad").mkdir()
    (folder / "bad/cloud").write_text("a file in the place of the folder")
    project = project_of(cloud, folder)
    assert (list(project.unread), len(shown(project))) == ([str(folder / "bad")], 2)
    delete_all(cloud, project)
    assert cloud.slices == {}


def test_calls_that_do_not_end_are_absent(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fifo = folder / "fifo"
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    answers = bounded_calls(lambda path: path.read_bytes() if path == fifo else b"", [fifo, folder], 0.3)
    assert answers == {folder: b""}


def test_a_table_that_cannot_be_shown_does_not_stop_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud = cloud_with(folder)

    def broken(*arguments: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr("forerun.cli.cloud.show_runs.table", broken)
    monkeypatch.setattr(down, "providers_of", lambda arguments: (ListedProvider(cloud),))
    monkeypatch.setattr(down, "LATE_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    assert main(["down", "--all", "--yes"]) == 0
    assert cloud.slices == {}
    assert "forerun-bad-1 in us-east1-d" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["logs", "--no-follow"], ["stop"], ["fetch"]])
def test_commands_of_one_run_name_the_damaged_file(
    folder: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud_with(folder, **{"run.json": b"{}", "finished.json": b"{}"})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    assert main([*command, str(folder / "bad")]) == 2
    assert "E-CLOUD-092" in capsys.readouterr().err


def test_valid_records_are_not_damaged(folder: Path) -> None:
    cloud_with(folder)
    files = RunFiles(str(folder / "bad"))
    files.report_host(HostEntry(1, 0, 50.0, "training", 4))
    files.write_lease(LeaseEntry("laptop", 160.0))
    snapshot = read_snapshot(files)
    assert isinstance(snapshot, RecordSnapshot)
    assert (snapshot.damaged, snapshot.ready, snapshot.controller(NOW)) == ((), {1: ReadyEntry(10.0)}, "laptop")
