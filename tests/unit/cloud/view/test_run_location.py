"""Where the record of a run is found: by its resources, by the list of this machine, or by its address."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_assertions import assert_error
from recorded_cloud import ListedProvider, act, recorded_run, started

from forerun.cloud.provider import CloudUnavailable, Resource
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.view.run_location import MOST_RUNS, known_runs, list_file, locate_run, remember_runs
from forerun.errors import UserError


def nothing() -> list[Resource]:
    return []


def unavailable() -> list[Resource]:
    raise CloudUnavailable("503")


def record(folder: Path) -> str:
    RunFiles(str(folder)).create_run(recorded_run(folder))
    return str(folder)


def test_resources_name_the_folder_on_any_machine(tmp_path: Path) -> None:
    cloud, controller = started(tmp_path / "quick")
    act(cloud, controller, 60)
    found = locate_run("quick", ListedProvider(cloud).list, ())
    assert found.address == str(tmp_path / "quick")
    with pytest.raises(UserError) as caught:
        locate_run("other", ListedProvider(cloud).list, ())
    assert_error(caught.value, "E-CLOUD-065", what="other")


def test_a_run_without_resources_is_found_in_the_list(tmp_path: Path) -> None:
    folder = record(tmp_path / "bucket" / "Quick_1")
    other = str(tmp_path / "bucket" / "other")
    assert locate_run("Quick_1", nothing, [other, folder]).address == folder
    assert locate_run("Quick_1", unavailable, [folder]).address == folder  # the API is not needed then
    with pytest.raises(UserError) as caught:
        locate_run("other", nothing, [other])  # it has no record
    assert_error(caught.value, "E-CLOUD-065")
    with pytest.raises(CloudUnavailable):
        locate_run("other", unavailable, [other])  # it may exist


def test_two_runs_of_one_name_need_an_address(tmp_path: Path) -> None:
    first, second = record(tmp_path / "a" / "quick"), record(tmp_path / "b" / "quick")
    with pytest.raises(UserError) as caught:
        locate_run("quick", nothing, [second, first])
    assert_error(caught.value, "E-CLOUD-066", why=second, fix=first)
    assert locate_run(f"{second}/", unavailable, ()).address == second


def test_an_address_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        locate_run(str(tmp_path), nothing, ())
    assert_error(caught.value, "E-CLOUD-065", what=str(tmp_path))


def test_the_list_keeps_the_newest_runs(tmp_path: Path) -> None:
    file = list_file({"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert file == tmp_path / "config" / "forerun" / "cloud-runs"
    assert known_runs(file) == ()
    remember_runs(["gs://b/1"], file)
    remember_runs(["gs://b/2", "gs://b/1"], file)
    assert known_runs(file) == ("gs://b/2", "gs://b/1")
    remember_runs([f"gs://c/{number}" for number in range(MOST_RUNS)], file)
    assert len(known_runs(file)) == MOST_RUNS
    file.write_bytes(b"\xff\xfe")
    assert known_runs(file) == ()
    file.unlink()
    file.mkdir()
    remember_runs(["gs://b/3"], file)  # cannot be written
    assert known_runs(file) == ()
