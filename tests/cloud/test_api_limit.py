"""The cap of a run, kept by the limit of Compute Engine alone: no controller and no agent act.

The fake's bill is the oracle. The run trains a real job, which must have a checkpoint at the end.
"""

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from fake import FakeCloud

from forerun.cloud.control.actions import Action, EndRun, RequestSlice
from forerun.cloud.control.controller import Controller
from forerun.cloud.control.run_view import ControlView
from forerun.cloud.provider import HostAddress, Provider
from forerun.cloud.providers import provider_named
from forerun.cloud.record.entries import ENDED_BUDGET, AttemptEntry, CloudRun, LeaseEntry, Option
from forerun.cloud.record.run_files import RunFiles
from forerun.exit_codes import STOPPED

USD_PER_HOUR = 8 * 2.7  # v6e-8 in us-east5-a, prices.csv
MAX_USD = 5.0
DAY_SECONDS = 24 * 3600.0
PATIENCE_SECONDS = 600.0
JOB = """\
name: limited
model: {layers: 1, embed: 16, heads: 2}
data: text
sequence: 16
batch: 8
steps: 20000
device: cpu
devices: 1
optimizer: {lr: 1e-2}
precision: {compute: float32}
remat: none
checkpoint: {every: 20}
sample: {tokens: 0}
"""


class NoDelivery:
    """The machine has the job already."""

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        return {}

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        return ""

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        raise AssertionError("the controller is gone before the slice is ready")


class NoDisplay:
    def show(self, view: ControlView, action: Action) -> None: ...

    def standby(self, view: ControlView, lease: LeaseEntry) -> None: ...

    def trouble(self, message: str) -> None:
        raise AssertionError(message)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition is never true"
        time.sleep(0.05)


def controller(files: RunFiles, provider: Provider, holder: str) -> Controller:
    run = files.run()
    assert isinstance(run, CloudRun)
    return Controller(run, files, {"compute": provider}, NoDelivery(), NoDisplay(), holder)


def test_the_api_alone_keeps_the_cap(tmp_path: Path) -> None:
    machine, bucket = tmp_path / "machine", tmp_path / "bucket"
    (machine / "text").mkdir(parents=True)
    (machine / "text" / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    (machine / "job.yaml").write_text(JOB)
    arguments = ["job.yaml", f"checkpoint.folder={bucket}", f"runs={machine / 'runs'}"]
    option = Option("compute", "v6e-8", "us-east5-a", "on-demand", 1, USD_PER_HOUR)
    files = RunFiles(str(bucket / "limited"))
    options = {"arguments": arguments, "folder": str(machine)}
    with FakeCloud(machines="training_machine:TrainingMachine", machine_options=options) as cloud:
        provider = provider_named("compute", environment=os.environ | cloud.environment())
        assert files.create_run(CloudRun("limited", files.address, JOB, (option,), MAX_USD, cloud.now(), device="cpu"))
        first = controller(files, provider, "first laptop")
        while not isinstance(first.step()[1], RequestSlice):
            pass
        # From here on, nothing controls the run: the laptop is off, and the machine has no agent.
        cloud.advance(10)  # the machine starts
        wait_for(lambda: bool(saved_steps(bucket / "limited")))
        cloud.advance(DAY_SECONDS)
        wait_for((machine / "exit_code").exists)

        limit_seconds = math.floor(MAX_USD / USD_PER_HOUR * 3600)
        assert cloud.bill() == {"forerun-limited-1": pytest.approx(USD_PER_HOUR * limit_seconds / 3600)}
        assert MAX_USD - USD_PER_HOUR / 3600 < cloud.bill()["forerun-limited-1"] <= MAX_USD
        assert cloud.resources() == []

        # The guest got SIGTERM: the last step is in a checkpoint.
        assert int((machine / "exit_code").read_text()) == STOPPED
        assert max(saved_steps(bucket / "limited")) == last_step(machine / "train.log")

        # A second laptop learns from the cloud what the run cost. It rents nothing more.
        # It has its own connection: that of the first laptop would continue the clock of before `advance`.
        provider = provider_named("compute", environment=os.environ | cloud.environment())
        view, end = controller(files, provider, "second laptop").follow(lambda seconds: None)
        assert isinstance(end, EndRun)
        assert end.reason == ENDED_BUDGET
        assert view.spent_usd == pytest.approx(cloud.bill()["forerun-limited-1"], abs=0.005)
        assert len(cloud.bill()) == 1


def saved_steps(folder: Path) -> set[int]:
    """Return the steps of the checkpoints that are complete."""
    return {int(one.parent.name.split("-")[0]) for one in folder.glob("*/commit_success.txt")}


def last_step(log: Path) -> int:
    """Return the step at which training says that it stopped."""
    return max(int(found) for found in re.findall(r"\bstep (\d+)", log.read_text()))
