"""`forerun ps`, `stop` and `down` with the real providers against the fake cloud, from machines without local files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake.process import FakeCloud
from simulated_cloud import RecordedDisplay

from forerun.cli.cloud import end_runs as down
from forerun.cli.main import main
from forerun.cloud.control.controller import Controller
from forerun.cloud.google.rest import Rest
from forerun.cloud.provider import HostAddress
from forerun.cloud.providers import provider_named
from forerun.cloud.record.entries import STOPPED, TRAINING, AttemptEntry, CloudRun, EndEntry, HostEntry, Option
from forerun.cloud.record.run_files import RunFiles

ZONE = "us-east5-b"
Capture = pytest.CaptureFixture[str]
OPTIONS = {
    "queued resource": Option("tpu", "v6e-16", ZONE, "spot", 4, 16 * 1.5437),
    "node": Option("tpu", "v6e-8", ZONE, "on-demand", 1, 21.6),
    "instance": Option("compute", "v6e-8", ZONE, "spot", 1, 8 * 1.5437),
    "instance group": Option("compute", "v6e-16", ZONE, "on-demand", 4, 43.2),
}


class Killed(BaseException):
    """The process of the controller was killed."""


class Delivery:
    """Hosts that train as soon as the job arrives."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        return {"startup-script": "#!/bin/bash\n"}

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        report(self.files, attempt, TRAINING)

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        return ""


def report(files: RunFiles, attempt: AttemptEntry, phase: str) -> None:
    for host in range(attempt.option.hosts):
        files.report_host(HostEntry(attempt.number, host, attempt.created_at, phase, step=7))


@pytest.fixture(scope="module")
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as found:
        yield found


@pytest.fixture
def laptop(cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that starts a new machine: no local file of another one exists on it."""
    for name, value in cloud.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(down, "LATE_SECONDS", 0.0)
    monkeypatch.setattr("os.fsync", lambda file: None)
    yield lambda name: monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / f"config of {name}"))
    assert cloud.resources() == []


def controller(folder: Path, option: Option, now: float) -> Controller:
    files = RunFiles(str(folder))
    run = CloudRun(folder.name, str(folder), "name: x\n", (option,), 400.0, now, total_steps=20)
    files.create_run(run)
    return Controller(
        run, files, {option.provider: provider_named(option.provider)}, Delivery(files), RecordedDisplay(), "laptop"
    )


def train(one: Controller, cloud: FakeCloud) -> AttemptEntry:
    """Act until the hosts train."""
    for _ in range(50):
        view, _ = one.step()
        if view.hosts:
            assert view.current is not None
            return view.current.entry
        cloud.advance(5)
    raise AssertionError("the hosts do not train")


def listed(capsys: Capture) -> Any:
    capsys.readouterr()
    assert main(["ps", "--all", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["resources"]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_kill_after_any_request_leaves_nothing_that_ps_and_down_do_not_find(
    kind: str,
    cloud: FakeCloud,
    laptop: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    call, killed, kill_at = Rest.call, True, 0
    while killed:
        kill_at, sent = kill_at + 1, 0

        def count(self: Rest, method: str, *arguments: Any, **options: Any) -> dict[str, Any]:
            nonlocal sent
            answer = call(self, method, *arguments, **options)
            sent += method != "GET"
            if sent == kill_at:  # noqa: B023  (called in this iteration only)
                raise Killed
            return answer

        name = f"{kind.replace(' ', '-')}-{kill_at}"
        laptop("the user")
        with monkeypatch.context() as patch:
            patch.setattr(Rest, "call", count)
            try:
                train(controller(tmp_path / name, OPTIONS[kind], cloud.now()), cloud)
                killed = False
            except Killed:
                pass
        laptop("a colleague")
        assert {row["run"] for row in listed(capsys)} == {name}
        assert main(["down", "--all", "--yes"]) == 0
        assert cloud.resources() == []
        assert listed(capsys) == []
        end = RunFiles(str(tmp_path / name)).end(1)
        assert end is not None
        assert end.usd == pytest.approx(cloud.bill().get(f"forerun-{name}-1", 0.0), abs=0.01)
    assert kill_at > (3 if kind == "instance group" else 1)


def test_two_laptops_see_the_same_and_either_may_stop_the_run(
    cloud: FakeCloud, laptop: Callable[[str], None], tmp_path: Path, capsys: Capture
) -> None:
    laptop("the user")
    one = controller(tmp_path / "shared", OPTIONS["queued resource"], cloud.now())
    attempt = train(one, cloud)
    cloud.advance(60)
    (first,) = listed(capsys)
    laptop("a colleague")
    (row,) = listed(capsys)
    assert row.pop("usd") == pytest.approx(first.pop("usd"), abs=0.05)  # some seconds later
    assert row == first
    assert (row["run"], row["slice"], row["zone"], row["step"]) == ("shared", "v6e-16", ZONE, 7)
    assert row["deadline"] == pytest.approx(cloud.now() + 400 / 24.6992 * 3600, abs=120)
    assert main(["stop", "shared", "--no-wait"]) == 0
    report(one.files, attempt, STOPPED)
    one.lease.release(cloud.now())  # the first laptop sleeps
    assert main(["stop", "shared"]) == 0
    assert cloud.resources() == []
    assert main(["down", "shared", "--yes"]) == 0


def test_a_damaged_report_of_another_run_blocks_neither_ps_nor_down(
    cloud: FakeCloud, laptop: Callable[[str], None], tmp_path: Path, capsys: Capture
) -> None:
    laptop("the user")
    for name in ("mine", "other", "lost"):
        train(controller(tmp_path / name, OPTIONS["node"], cloud.now()), cloud)
    file = tmp_path / "other/cloud/hosts/001-00.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "at": "x"}))
    shutil.rmtree(tmp_path / "lost")
    laptop("a colleague")
    rows = {row["run"]: (row["state"], row["step"]) for row in listed(capsys)}
    assert rows == {"mine": ("training", 7), "other": ("damaged record", None), "lost": ("ready", None)}
    assert main(["ps"]) == 0
    assert "001-00.json" in "".join(capsys.readouterr().out.split())
    assert main(["down", "--all", "--yes"]) == 0
    assert cloud.resources() == []
    for name in ("mine", "other"):
        end = RunFiles(str(tmp_path / name)).end(1)
        assert isinstance(end, EndEntry)
        assert end.usd == pytest.approx(cloud.bill()[f"forerun-{name}-1"], abs=0.01)


def test_down_deletes_one_run_and_leaves_the_other(
    cloud: FakeCloud, laptop: Callable[[str], None], tmp_path: Path, capsys: Capture
) -> None:
    laptop("the user")
    for name in ("one", "two"):
        train(controller(tmp_path / name, OPTIONS["node"], cloud.now()), cloud)
    laptop("a colleague")
    assert main(["down", "one", "--yes"]) == 0
    assert [row["run"] for row in listed(capsys)] == ["two"]
    assert main(["down", "--all", "--yes"]) == 0
