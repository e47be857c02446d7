"""Deletion of everything that a run has rented: complete, in a safe order, with the right bill in the record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from error_assertions import assert_error
from recorded_cloud import START, ListedProvider, RecordedCloud, act, recorded_run, started
from simulated_cloud import controller

from forerun.cloud import labels
from forerun.cloud.provider import (
    ApiDisabled,
    CloudUnavailable,
    Provider,
    Resource,
    SliceState,
    SliceStatus,
    ZonesUnreachable,
)
from forerun.cloud.record.entries import Option
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.view.project_state import list_resources, read_project
from forerun.cloud.view.removal import (
    RemovalTarget,
    removal_targets,
    require_removed,
    resources_of,
    snapshots_of,
    take_down,
)
from forerun.cloud.view.snapshot import read_snapshot
from forerun.errors import UserError
from forerun.reporter import SILENT


def down(cloud: RecordedCloud, name: str | None = "quick") -> None:
    """Delete as the command does."""
    provider = ListedProvider(cloud)
    project = read_project(lambda: [provider], [str(cloud.folder)], 0.0)
    assert project.now == cloud.now
    chosen = resources_of(name, project.resources)
    result = take_down(
        removal_targets(chosen),
        snapshots_of(name, chosen, project.snapshots),
        {"tpu": provider},
        project.now,
        SILENT,
    )
    assert (result.failed, result.unrecorded) == ({}, {})
    require_removed(resources_of(name, provider.list()), result.failed)


@pytest.mark.parametrize("seconds", [5, 10, 30, 60, 300])
@pytest.mark.parametrize("tells_times", [True, False])
def test_nothing_remains_at_any_moment_and_the_bill_is_right(tmp_path: Path, seconds: int, tells_times: bool) -> None:
    cloud, one = started(tmp_path / "quick")
    cloud.tells_times = tells_times
    act(cloud, one, seconds)
    cloud.advance(7)
    down(cloud)
    cloud.advance(600)
    found = read_snapshot(cloud.files())
    assert found is not None
    assert (cloud.slices, found.open_attempts, found.end_reason) == ({}, (), "stopped")
    assert found.usd(cloud.now) == pytest.approx(cloud.bill(), abs=0.02 if tells_times else 0.05)
    _, end = controller(cloud).follow(cloud.advance)  # a controller that still runs rents nothing
    assert (end.reason, len(cloud.created)) == ("stopped", len(set(cloud.created)))
    assert cloud.slices == {}


def test_a_slice_that_no_controller_saw_ready_is_billed_too(tmp_path: Path) -> None:
    cloud, one = started(tmp_path / "quick")
    act(cloud, one, 10)
    assert next(iter(cloud.slices.values())).state is SliceState.WAITING
    cloud.advance(400)  # the controller is dead; the slice becomes ready and is billed
    down(cloud)
    found = read_snapshot(cloud.files())
    assert found is not None
    assert found.usd(cloud.now) == pytest.approx(cloud.bill(), abs=0.001)
    assert cloud.bill() > 1.0


def test_a_request_that_is_not_listed_yet_is_deleted(tmp_path: Path) -> None:
    cloud, one = started(tmp_path / "quick")
    act(cloud, one, 15)
    provider = ListedProvider(cloud)
    project = read_project(lambda: [provider], [str(cloud.folder)], 0.0)
    take_down((), snapshots_of("quick", (), project.snapshots), {"tpu": provider}, project.now, SILENT)
    assert cloud.slices == {}


def test_one_run_of_two_is_deleted(tmp_path: Path) -> None:
    cloud, one = started(tmp_path / "quick")
    act(cloud, one, 60)
    other = Resource(
        "tpu", "node", "forerun-other-1", "z", SliceStatus(SliceState.READY), labels.slice_labels("other", 1), {}
    )
    listed = [*ListedProvider(cloud).list(), other]
    assert [one.name for one in resources_of("Quick", listed)] == ["forerun-quick-1"]
    assert [one.name for one in resources_of(str(cloud.folder), listed)] == ["forerun-quick-1"]
    assert resources_of(None, listed) == tuple(listed)
    found = read_snapshot(cloud.files())
    assert found is not None
    another = replace(found, run=recorded_run(tmp_path / "another"))
    records = {str(cloud.folder): found, str(tmp_path / "another"): another}
    assert list(snapshots_of("quick", (), records)) == [str(cloud.folder)]
    assert list(snapshots_of(f"{tmp_path}/another/", (), records)) == [str(tmp_path / "another")]
    assert len(snapshots_of(None, (), records)) == 2


def test_keepers_are_deleted_before_slices_and_these_before_the_rest() -> None:
    status = SliceStatus(SliceState.READY)
    run = {labels.RUN: "quick"}
    resources = [
        Resource("compute", "template", "b", "global", status, run, costs_money=False),
        Resource("tpu", "queued resource", "a", "z", status, run),
        Resource("tpu", "node", "a", "z", status, run, slice="v6e-8"),
        Resource("compute", "instance", "k", "z", status, {**run, labels.ROLE: labels.KEEPER_ROLE}, slice="e2-small"),
    ]
    assert removal_targets(resources) == (
        RemovalTarget("compute", "k", "z"),
        RemovalTarget("tpu", "a", "z"),
        RemovalTarget("compute", "b", "global"),
    )


def test_one_failure_does_not_prevent_the_rest(tmp_path: Path) -> None:
    cloud, one = started(tmp_path / "quick")
    act(cloud, one, 60)

    class Failing(ListedProvider):
        def delete(self, name: str, zone: str) -> float | None:
            if name == "lost":
                raise CloudUnavailable("503 from the API")
            return super().delete(name, zone)

    provider = Failing(cloud)
    targets = (RemovalTarget("tpu", "lost", "z"), *removal_targets(provider.list()))
    result = take_down(targets, {}, {"tpu": provider}, START, SILENT)
    assert cloud.slices == {}
    assert (list(result.failed), len(result.deleted)) == ([targets[0]], 1)
    lost = Resource("tpu", "node", "lost", "z", SliceStatus(SliceState.READY), {})
    with pytest.raises(UserError) as caught:
        require_removed([lost], result.failed)
    assert_error(caught.value, "E-CLOUD-069", what="lost", why="503 from the API")
    require_removed([], result.failed)


def test_an_attempt_whose_deletion_failed_stays_open(tmp_path: Path) -> None:
    cloud, one = started(tmp_path / "quick")
    act(cloud, one, 60)

    class Failing(ListedProvider):
        def delete(self, name: str, zone: str) -> float | None:
            raise CloudUnavailable("503")

    provider = Failing(cloud)
    project = read_project(lambda: [provider], [], 0.0)
    take_down(removal_targets(project.resources), project.snapshots, {"tpu": provider}, project.now, SILENT)
    found = read_snapshot(cloud.files())
    assert found is not None
    assert (len(found.open_attempts), found.stop is not None, len(cloud.slices)) == (1, True, 1)
    down(cloud)  # the same command again
    assert cloud.slices == {}


def test_errors_of_a_provider_do_not_hide_the_others(tmp_path: Path) -> None:
    cloud, one = started(tmp_path / "quick")
    act(cloud, one, 60)

    class Down(ListedProvider):
        name = "compute"

        def list(self) -> list[Resource]:
            raise CloudUnavailable("503")

        def now(self) -> float:
            raise CloudUnavailable("503")

    project = read_project(lambda: [Down(cloud), ListedProvider(cloud)], [str(tmp_path / "none")], 0.0)
    assert [error.code for error in project.errors] == ["E-CLOUD-067"]
    assert (len(project.resources), list(project.snapshots), project.now) == (1, [str(cloud.folder)], cloud.now)
    assert read_project(lambda: [Down(cloud)], [], 77.0).now == 77.0
    (cloud.folder / "cloud" / "run.json").write_text("{")
    assert list(read_project(lambda: [ListedProvider(cloud)], [], 0.0).unread) == [str(cloud.folder)]


def test_zones_that_do_not_answer_and_apis_that_are_not_enabled(tmp_path: Path) -> None:
    cloud, one = started(tmp_path / "quick")
    act(cloud, one, 60)

    class Partly(ListedProvider):
        def list(self) -> list[Resource]:
            raise ZonesUnreachable(["us-east1-c"], super().list())

    class Disabled(ListedProvider):
        def list(self) -> list[Resource]:
            raise ApiDisabled("E-CLOUD-013", "an API is not enabled", why="", fix="")

    found, errors = list_resources([Partly(cloud), Disabled(cloud)])
    assert ([one.name for one in found], [error.code for error in errors]) == (["forerun-quick-1"], ["E-CLOUD-067"])
    assert "us-east1-c" in errors[0].why
    assert list_resources([ListedProvider(cloud), Disabled(cloud)])[1] == []
    assert [error.code for error in list_resources([Disabled(cloud)])[1]] == ["E-CLOUD-013"]


def test_existing_machines_need_no_credentials(tmp_path: Path) -> None:
    def no_credentials() -> list[Provider]:
        raise UserError("E-CLOUD-011", "there are no credentials", why="", fix="")

    here, there = tmp_path / "here", tmp_path / "there"
    RunFiles(str(here)).create_run(recorded_run(here, Option("ssh", "2 machines", "/m.yaml", "on-demand", 2, 0.0)))
    RunFiles(str(there)).create_run(recorded_run(there))
    project = read_project(no_credentials, [str(here)], 5.0)
    assert (project.errors, list(project.snapshots), project.now) == ((), [str(here)], 5.0)
    for known in ([], [str(here), str(there)]):
        assert [error.code for error in read_project(no_credentials, known, 5.0).errors] == ["E-CLOUD-011"]
