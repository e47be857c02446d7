"""The commands of cloud runs against a simulated cloud: what they print, delete, record and download."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_cloud import ListedProvider, RecordedCloud, act, started

from forerun.cli.cloud import connection, end_runs, show_runs
from forerun.cli.main import main
from forerun.cloud.provider import CloudUnavailable, Resource
from forerun.cloud.record.entries import EndEntry, FinishEntry, StopEntry

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedCloud:
    """A cloud with the run `quick`, which trains for some minutes. Its clock moves while commands wait."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda file: None)  # most of the time of these tests
    found, controller = started(tmp_path / "quick")
    act(found, controller, 300)
    for module in (end_runs, show_runs):
        monkeypatch.setattr(module, "time", SimulatedTime(found))
    use(monkeypatch, ListedProvider(found))
    return found


class SimulatedTime:
    """The functions of `time` that commands use, in the time of a simulated cloud."""

    def __init__(self, cloud: RecordedCloud, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.cloud, self.on_sleep = cloud, on_sleep

    def time(self) -> float:
        return self.cloud.now

    def monotonic(self) -> float:
        return self.cloud.now

    def sleep(self, seconds: float) -> None:
        self.on_sleep()
        self.cloud.advance(seconds)


def use(monkeypatch: pytest.MonkeyPatch, *providers: ListedProvider) -> None:
    for module in (connection, end_runs, show_runs):
        monkeypatch.setattr(module, "providers_of", lambda args: providers)
    monkeypatch.setattr(end_runs, "providers_of_run", lambda args, snapshot: {one.name: one for one in providers})


def rows(capsys: Capture) -> Any:
    return json.loads(capsys.readouterr().out)


def test_ps_shows_what_costs_money(cloud: RecordedCloud, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["ps", "--json"]) == 0
    found = rows(capsys)
    (row,) = found["resources"]
    assert (row["run"], row["slice"], row["zone"], row["state"]) == ("quick", "v6e-8", "us-east1-d", "training")
    assert row["usd"] == pytest.approx(cloud.bill(), abs=0.005)
    assert (row["max_usd"], row["usd_per_hour"], found["now"]) == (40.0, 10.0, cloud.now)
    values = ("quick", "v6e-8 spot", "us-east1-d", "training", f"${cloud.bill():.2f}", "$40", "$10.00")
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["ps"]) == 0
        printed = capsys.readouterr().out
        assert [value for value in values if value not in printed] == []
        assert ("/600" in printed) == (columns == "120")
        assert max(len(line.rstrip()) for line in printed.splitlines()) <= int(columns)


def test_ps_lists_runs_without_resources_and_ended_ones_on_request(cloud: RecordedCloud, capsys: Capture) -> None:
    assert main(["ps"]) == 0  # this machine now knows the run
    cloud.preempt()
    for one in list(cloud.slices.values()):
        cloud.end(one)
    cloud.files().create_end(1, EndEntry(cloud.now, "preempted", 0.5))
    capsys.readouterr()
    assert main(["ps", "--json"]) == 0
    found = rows(capsys)
    assert found["resources"] == []
    assert [(run["run"], run["usd"]) for run in found["runs"]] == [("quick", 0.5)]
    cloud.files().request_stop(StopEntry(cloud.now, "forerun stop"))
    assert main(["ps", "--json"]) == 0
    assert rows(capsys)["runs"] == []
    assert main(["ps", "--all"]) == 0
    assert "quick: stopped" in capsys.readouterr().out


def test_an_incomplete_list_is_an_error(cloud: RecordedCloud, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(ListedProvider):
        name = "compute"

        def list(self) -> list[Resource]:
            raise CloudUnavailable("503")

    use(monkeypatch, ListedProvider(cloud), Silent(cloud))
    assert main(["ps"]) == 74
    printed = capsys.readouterr()
    assert "forerun-quick" not in printed.err
    assert ("quick" in printed.out, "E-CLOUD-067" in printed.err) == (True, True)
    assert main(["down", "quick", "--yes"]) == 74
    assert cloud.slices == {}  # what is listed is deleted
    assert main(["down", "quick", "--yes"]) == 74  # more may exist


def test_stop_saves_a_checkpoint_and_deletes_the_slice(cloud: RecordedCloud, capsys: Capture) -> None:
    trained = cloud.trained_seconds
    assert main(["stop", "quick"]) == 0
    assert cloud.slices == {}
    files = cloud.files()
    entry, end = files.stop(), files.end(1)
    assert entry is not None
    assert end is not None
    assert (entry.reason, end.reason) == ("forerun stop", "stopped")
    assert files.hosts(1, 2)[0].phase == "stopped"  # the slice was deleted after the hosts had stopped
    assert cloud.trained_seconds == trained
    printed = capsys.readouterr()
    assert f"${cloud.bill():.2f}" in printed.out
    assert str(cloud.folder) in printed.out
    assert main(["stop", "quick"]) == 0  # known by its name, without resources
    assert "already" in capsys.readouterr().out


def test_stop_without_waiting_only_asks(cloud: RecordedCloud) -> None:
    assert main(["stop", "quick", "--no-wait"]) == 0
    assert len(cloud.slices) == 1
    assert cloud.files().stop() is not None


def test_down_deletes_everything_and_keeps_the_record(cloud: RecordedCloud, capsys: Capture) -> None:
    before = {path for path in cloud.folder.rglob("*") if path.is_file()}
    assert main(["down", "quick", "--yes"]) == 0
    assert cloud.slices == {}
    assert before <= {path for path in cloud.folder.rglob("*") if path.is_file()}
    end = cloud.files().end(1)
    assert end is not None
    assert end.usd == pytest.approx(cloud.bill(), abs=0.005)
    capsys.readouterr()
    assert main(["down", "--all", "--yes"]) == 0
    assert main(["down", "unknown", "--yes"]) == 0
    assert "deleting" not in capsys.readouterr().err


def test_down_all_finds_what_a_late_request_creates(
    cloud: RecordedCloud, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (late,) = cloud.slices.values()
    key = ("forerun-quick-1", "us-east1-d")

    def appear() -> None:
        if not cloud.past or len(cloud.past) > 1:
            return
        cloud.slices[key] = late

    monkeypatch.setattr(end_runs, "time", SimulatedTime(cloud, appear))
    assert main(["down", "--all", "--yes"]) == 0
    assert cloud.slices == {}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["down"], "E-CLOUD-068"),
        (["down", "quick", "--all"], "E-CLOUD-068"),
        (["down", "quick"], "E-CLOUD-070"),  # the input of tests is not a terminal
        (["stop", "other"], "E-CLOUD-065"),
        (["logs", "quick", "--attempt", "2"], "E-CLOUD-076"),
        (["logs", "quick", "--host", "2"], "E-CLOUD-077"),
        (["fetch", "quick"], "E-CLOUD-078"),
        (["logs", "quick", "--host", "-1"], "E-COMMAND-023"),
    ],
)
def test_mistakes(cloud: RecordedCloud, capsys: Capture, words: list[str], code: str) -> None:
    assert main(words) == 2
    assert f"[{code}]" in capsys.readouterr().err
    assert len(cloud.slices) == 1


def test_down_asks_once(cloud: RecordedCloud, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["n", "y"])
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["down", "quick"]) == 1
    assert (len(cloud.slices), cloud.files().stop()) == (1, None)
    assert main(["down", "quick"]) == 0
    assert cloud.slices == {}


def test_logs_of_a_host_up_to_now(cloud: RecordedCloud, capsys: Capture) -> None:
    files = cloud.files()
    for part in range(3):
        files.add_log(1, 1, part, f"step {part} \x1b[31mred\n".encode())
    assert main(["logs", "quick", "--host", "1", "--no-follow"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"step {part} \\x1b[31mred" for part in range(3)]
    assert "attempt 1" in printed.err


def test_logs_follow_attempts_and_outages_until_the_end(
    cloud: RecordedCloud, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, count = cloud.files(), 0
    kind = type(files.files)
    read_many = kind.read_many

    def live() -> None:
        """Each wait adds something: parts, an outage of the bucket, a second attempt, the end."""
        nonlocal count
        count += 1
        monkeypatch.setattr(kind, "read_many", read_many)
        if count < 8:
            files.add_log(1, 0, count, f"first {count}\n".encode())
        if count in (3, 4):
            monkeypatch.setattr(kind, "read_many", lambda *_: (_ for _ in ()).throw(OSError("no network")))
        if count == 8:
            entry = files.attempts()[1]
            files.create_end(1, EndEntry(cloud.now, "preempted", 0.1))
            files.create_attempt(type(entry)(2, entry.option, "forerun-quick-2", cloud.now, 100, 0.1))
        if 8 <= count < 20:
            files.add_log(2, 0, count, f"second {count}\n".encode())
        if count == 20:
            files.create_finished(FinishEntry(cloud.now, 2, {}))
            files.create_end(2, EndEntry(cloud.now, "finished", 0.1))
        assert count < 60

    files.add_log(1, 0, 0, b"first 0\n")
    cloud.slices.clear()
    monkeypatch.setattr(show_runs, "time", SimulatedTime(cloud, live))
    assert main(["logs", str(cloud.folder)]) == 0
    printed = capsys.readouterr()
    assert printed.out.split("\n")[:-1] == [f"first {n}" for n in range(8)] + [f"second {n}" for n in range(8, 20)]
    assert printed.err.count("no network") == 1
    assert "forerun fetch quick" in printed.err


def test_logs_end_without_a_controller(cloud: RecordedCloud, capsys: Capture) -> None:
    cloud.slices.clear()
    cloud.files().create_end(1, EndEntry(cloud.now, "preempted", 0.1, "taken"))
    before = cloud.now
    assert main(["logs", str(cloud.folder)]) == 0
    assert 120 < cloud.now - before < 200
    assert "taken" in capsys.readouterr().err


def test_fetch_downloads_verified_results(cloud: RecordedCloud, capsys: Capture) -> None:
    files, contents = cloud.files(), {"export/model.safetensors": b"weights", "cloud/run/summary.json": b"{}"}
    for name, content in contents.items():
        files.run_folder.replace(name, content)
    entry = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()}
    files.create_finished(FinishEntry(cloud.now, 1, entry))
    assert main(["fetch", "quick"]) == 0
    assert Path("runs/quick/export/model.safetensors").read_bytes() == b"weights"
    assert Path("runs/quick/summary.json").read_bytes() == b"{}"
    assert "2 files" in capsys.readouterr().out
    assert main(["fetch", str(cloud.folder), "--to", "elsewhere"]) == 0
    assert Path("elsewhere/summary.json").exists()
    files.run_folder.replace("cloud/run/summary.json", b"[]")
    Path("elsewhere/summary.json").unlink()
    assert main(["fetch", "quick", "--to", "elsewhere"]) == 74
    assert "[E-CLOUD-074]" in capsys.readouterr().err
