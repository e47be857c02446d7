"""The simulated cloud with records in real folders, for tests of the commands of cloud runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simulated_cloud import START, SimulatedCloud, SimulatedProvider, cloud_run, controller, option

from forerun.cloud.control.controller import Controller
from forerun.cloud.provider import Resource, SliceStatus
from forerun.cloud.record.entries import CloudRun, Option
from forerun.cloud.record.run_files import RunFiles

PRICES = {"v6e-8": 10.0}


@dataclass
class RecordedCloud(SimulatedCloud):
    """A simulated cloud whose run has its record in a folder of this machine."""

    folder: Path = Path()

    def files(self, *, faulty: bool = False) -> RunFiles:
        return RunFiles(str(self.folder))


class ListedProvider(SimulatedProvider):
    """A provider that lists slices as the real ones do."""

    def list(self) -> Sequence[Resource]:
        return [
            Resource(
                "tpu",
                "node",
                name,
                zone,
                SliceStatus(one.state, ready_at=one.ready_at),
                one.request.labels,
                one.request.metadata,
                one.request.slice,
                one.request.capacity,
                created_at=one.queued_at,
            )
            for (name, zone), one in self.cloud.slices.items()
        ]


def recorded_run(folder: Path, *options: Option, max_usd: float | None = 40.0) -> CloudRun:
    run = cloud_run(*(options or (option(),)), max_usd=max_usd)
    return replace(run, name=folder.name, folder=str(folder), total_steps=600)


def started(folder: Path, *options: Option) -> tuple[RecordedCloud, Controller]:
    """Return a cloud with one run, and its controller."""
    cloud = RecordedCloud(PRICES, folder=folder)
    cloud.files().create_run(recorded_run(folder, *options))
    return cloud, controller(cloud)


def act(cloud: RecordedCloud, one: Controller, seconds: float) -> None:
    """Let a controller act for some time."""
    end = cloud.now + seconds
    while cloud.now < end:
        one.step()
        cloud.advance(5)


__all__ = ["START", "ListedProvider", "RecordedCloud", "act", "option", "recorded_run", "started"]
