"""The process of a keeper: it controls the run, pays for itself within the cap, and deletes itself at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simulated_cloud import START, SimulatedCloud, SimulatedDelivery, SimulatedProvider, cloud_run, option

from forerun.cloud.host.settings import TRAIN_UNIT
from forerun.cloud.keeper.keeper_process import KeeperSettings, read_keeper_settings, run_keeper
from forerun.cloud.provider import NameTaken, SliceRequest, SliceStatus
from forerun.cloud.record.entries import AttemptEntry, CloudRun
from forerun.cloud.setup.bundle import Bundle
from forerun.cloud.setup.job_files import JobFiles
from forerun.cloud.ssh import delivery
from forerun.errors import UserError
from forerun.reporter import SILENT

PRICES = {"v6e-8": 10.0, "e2-small": 0.5}
RUN = replace(cloud_run(option()), keeper=True, keeper_usd_per_hour=0.5, keeper_at=START)
SETTINGS = KeeperSettings(RUN, "p", "forerun-sim-keeper", "us-east1-c", ("data=/var/lib/forerun/job/text",))


def cloud_with_keeper(*, work_seconds: float, max_usd: float) -> SimulatedCloud:
    cloud = SimulatedCloud(PRICES, work_seconds=work_seconds)
    cloud.files().create_run(replace(RUN, max_usd=max_usd))
    labels = {"forerun-run": "sim", "forerun-role": "keeper"}
    SimulatedProvider(cloud).create(
        SliceRequest("forerun-sim-keeper", "e2-small", "us-east1-c", "on-demand", labels, {}, "id")
    )
    return cloud


def keep(cloud: SimulatedCloud, provider: SimulatedProvider) -> str:
    providers = {"tpu": provider, "compute": provider}
    run = cloud.files().run()
    assert isinstance(run, CloudRun)
    settings = replace(SETTINGS, run=run)
    elapsed = lambda: cloud.now  # noqa: E731
    sender = SimulatedDelivery(cloud)
    end = run_keeper(settings, providers, sender, SILENT, cloud.advance, cloud.files(), elapsed=elapsed)
    return end.reason


def test_a_keeper_deletes_itself_with_the_run() -> None:
    cloud = cloud_with_keeper(work_seconds=300, max_usd=40)
    assert keep(cloud, SimulatedProvider(cloud)) == "finished"
    assert cloud.slices == {}
    lease = cloud.files().lease()
    assert lease is not None
    assert lease.holder.startswith("keeper:")


def test_the_cap_contains_the_keeper() -> None:
    """Slice and keeper together stay below the cap. The keeper is billed for all the time, also for the queue."""
    cloud = cloud_with_keeper(work_seconds=1e9, max_usd=8.0)
    cloud.queue_seconds = 3 * 3600.0
    assert keep(cloud, SimulatedProvider(cloud)) == "budget"
    slices = [one for one in cloud.past if one.request.slice == "v6e-8"]
    rented = sum((one.ended_at or 0) - (one.ready_at or 0) for one in slices) * 10 / 3600
    kept = (cloud.now - START) * 0.5 / 3600
    assert 5.0 < rented + kept <= 8.0


def test_an_error_of_the_user_does_not_end_the_keeper() -> None:
    cloud = cloud_with_keeper(work_seconds=300, max_usd=40)

    class Failing(SimulatedProvider):
        failures = 3

        def status(self, name: str, zone: str) -> object:  # type: ignore[override]
            if self.failures:
                self.failures -= 1
                raise UserError("E-CLOUD-012", "what", why="why", fix="fix")
            return super().status(name, zone)

    assert keep(cloud, Failing(cloud)) == "finished"
    assert cloud.slices == {}


def test_a_keeper_keeps_the_cap_of_its_settings_when_the_record_is_deleted() -> None:
    cloud = cloud_with_keeper(work_seconds=1e9, max_usd=8.0)

    class Deleting(SimulatedProvider):
        def status(self, name: str, zone: str) -> SliceStatus:
            self.cloud.contents.pop("cloud/run.json", None)
            return super().status(name, zone)

    assert keep(cloud, Deleting(cloud)) == "budget"
    assert cloud.slices == {}
    assert 4.0 < cloud.bill() <= 8.0


def test_a_keeper_deletes_itself_when_the_slice_belongs_to_another_run() -> None:
    cloud = cloud_with_keeper(work_seconds=300, max_usd=40)

    class Taken(SimulatedProvider):
        def create(self, request: SliceRequest) -> None:
            raise NameTaken("E-CLOUD-022", "what", why="why", fix="fix")

    assert keep(cloud, Taken(cloud)) == "failed"
    assert cloud.slices == {}


def test_paths_of_the_job_are_those_of_the_keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundles: list[Bundle] = []
    monkeypatch.setattr(delivery, "deliver", lambda bundle, *_, **__: bundles.append(bundle))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run = replace(cloud_run(), arguments=("seed=1",))
    entry = AttemptEntry(1, option(), "forerun-sim-1", START, None, 0.0)
    files = JobFiles((), ())
    sender = delivery.SshDelivery(tmp_path, tmp_path, "p", SILENT, {}, local=files, overrides=SETTINGS.overrides)
    sender.deliver(run, entry, [], [])
    unit = bundles[0].files[f"units/{TRAIN_UNIT}"]
    assert isinstance(unit, bytes)
    assert b" seed=1 data=/var/lib/forerun/job/text " in unit


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "agent.json"
    file.write_bytes(SETTINGS.to_json())
    assert read_keeper_settings(file) == SETTINGS
