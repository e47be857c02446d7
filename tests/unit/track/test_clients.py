"""Trackers whose client runs in a separate process, with the real clients of wandb and trackio."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tracked_run
from error_assertions import raises_error
from trackio_database import trackio_rows
from wandb_server import WandbServer

from forerun.config.load import load
from forerun.track.backends import client_process
from forerun.track.backends.job_trackers import trackers_of

pytestmark = pytest.mark.timing

KEY = "5ec2e7" * 6 + "beef"
LAST = 30
SYNC_TRIES = 4
PATIENCE_SECONDS = 300.0
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture
def server() -> Iterator[WandbServer]:
    made = WandbServer(KEY)
    with made.serve():
        yield made


def start(folder: Path, resume_at: int, written: int, *settings: str, **variables: str) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        "-P",
        str(Path(tracked_run.__file__)),
        str(folder),
        str(resume_at),
        str(written),
        str(LAST),
    ]
    process = subprocess.Popen(
        [*words, *settings],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def _stop() -> Iterator[None]:
    """Kill the processes of a test that failed."""
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, said
    return said


def kill(*processes: int) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def client_of(process: subprocess.Popen[str]) -> int:
    """Return the identifier of the process of the client."""
    found = Path(f"/proc/{process.pid}/task").glob("*/children")
    (client,) = {int(child) for path in found for child in path.read_text().split()}
    return client


def cursor(folder: Path, name: str) -> int:
    try:
        return int(json.loads((folder / "tracked.json").read_text())["steps"].get(name, 0))
    except FileNotFoundError:
        return 0


def expected() -> list[dict[str, Any]]:
    """Return what a tracker must have: rows without null values, and with the texts of samples."""
    rows = [{"step": step, **tracked_run.row_of(step)} for step in range(1, LAST + 1)]
    return [
        {key: value[0]["text"] if key == "samples" else value for key, value in row.items() if value is not None}
        for row in rows
    ]


def wandb_rows(server: WandbServer) -> list[dict[str, Any]]:
    (run,) = server.runs.values()
    rows = []
    for row in run.rows():
        kept = {key: value for key, value in row.items() if not key.startswith("_")}
        if "samples" in kept:
            page = run.uploads[row["samples"]["path"]].decode()
            assert "<pre>&lt;a&gt;</pre>" in page
            kept["samples"] = page.rpartition("<pre>")[2].partition("</pre>")[0]
        rows.append({"step": row["_step"], **kept})
    return rows


def online(server: WandbServer) -> dict[str, str]:
    return {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}


def test_wandb_gets_rows_again_that_only_a_killed_client_had(tmp_path: Path, server: WandbServer) -> None:
    """The client has accepted step 19 when all processes are killed, but the server has refused everything."""
    server.down = True
    process = start(tmp_path, 0, 20, "track=wandb", **online(server))
    until(lambda: cursor(tmp_path, "wandb") == 19)
    kill(process.pid, client_of(process))
    finish_killed(process)
    (run,) = server.runs.values()
    assert run.rows() == []
    server.down = False
    assert finish(start(tmp_path, 12, LAST, "track=wandb", **online(server))) == ""
    assert wandb_rows(server) == expected()
    assert run.exit_codes[-1] == 0
    assert (run.display, run.project, run.config["model.name"]["value"]) == ("one", "forerun", "qwen3-0.6b")
    assert json.loads(run.lines("wandb-summary.json")[-1])["goodput"] == 0.5
    assert files_with(KEY, tmp_path) == []


def test_wandb_has_every_row_once_if_its_client_outlives_the_run(tmp_path: Path, server: WandbServer) -> None:
    process = start(tmp_path, 0, 20, "track=wandb", "track.project=mine", "track.entity=team", **online(server))
    server.wait_for(lambda: any(run.rows() for run in server.runs.values()))
    kill(process.pid)
    finish_killed(process)
    assert finish(start(tmp_path, 12, LAST, "track=wandb", "track.project=mine", **online(server))) == ""
    assert wandb_rows(server) == expected()
    (run,) = server.runs.values()
    assert run.project == "mine"
    assert run.exit_codes == [255, 0]


def test_wandb_offline_is_complete_after_a_kill_and_its_own_command_uploads_it(
    tmp_path: Path, server: WandbServer
) -> None:
    process = start(tmp_path, 0, 20, "track=wandb", WANDB_MODE="offline")
    until(lambda: cursor(tmp_path, "wandb") == 19)
    kill(process.pid, client_of(process))
    finish_killed(process)
    assert finish(start(tmp_path, 12, LAST, "track=wandb", WANDB_MODE="offline")) == ""
    folders = sorted(map(str, (tmp_path / "wandb").glob("offline-run-*")))
    assert len(folders) == 2
    words = [sys.executable, "-P", "-m", "wandb", "sync", *folders]
    environment = {**os.environ, **online(server)}
    # The command can exit with 0 without an upload, if its own service starts slowly. It skips what it has uploaded.
    for _ in range(SYNC_TRIES):
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        if server.runs and len(wandb_rows(server)) == LAST:
            break
    assert server.runs, done.stdout + done.stderr
    assert wandb_rows(server) == expected()


def rows_in(store: Path) -> list[dict[str, Any]]:
    """Return the rows of trackio, with the texts of samples."""
    rows = trackio_rows(store / "forerun.db")
    return [row | ({"samples": row["samples"]["_value"][0]["text"]} if "samples" in row else {}) for row in rows]


@pytest.mark.parametrize("both", [True, False])
def test_trackio_has_every_row_once_after_a_kill(tmp_path: Path, both: bool) -> None:
    """Its client is killed with the run, or outlives it."""
    store = tmp_path / "store"
    process = start(tmp_path, 0, 20, "track=trackio", TRACKIO_DIR=str(store))
    until(lambda: len(rows_in(store)) >= 1)
    kill(process.pid, *([client_of(process)] if both else []))
    finish_killed(process)
    assert finish(start(tmp_path, 12, LAST, "track=trackio", TRACKIO_DIR=str(store))) == ""
    assert rows_in(store) == expected()
    with closing(sqlite3.connect(store / "forerun.db")) as database:
        ((config,),) = database.execute("select config from configs").fetchall()
    assert json.loads(config)["model.name"] == "qwen3-0.6b"


def test_a_client_that_dies_is_started_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    process = start(tmp_path, 0, 20, "track=trackio", TRACKIO_DIR=str(store))
    until(lambda: len(rows_in(store)) >= 19)
    first = client_of(process)
    kill(first)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step in range(21, LAST + 1):
            file.write(json.dumps({"step": step, **tracked_run.row_of(step), "unix_seconds": 1.0}) + "\n")
    until(lambda: len(rows_in(store)) == LAST - 1)
    kill(process.pid)
    finish_killed(process)
    assert rows_in(store) == expected()[:-1]


def finish_killed(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGKILL


def files_with(secret: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def track_of(folder: Path, *settings: str) -> Any:
    (folder / "job.yaml").write_text(tracked_run.JOB)
    return load(folder / "job.yaml", settings).job.track


@pytest.mark.parametrize(
    ("variables", "netrc", "refused"),
    [
        ({}, "", True),
        ({"WANDB_API_KEY": KEY}, "", False),
        ({"WANDB_MODE": "offline"}, "", False),
        ({"WANDB_MODE": "disabled"}, "", False),
        ({"WANDB_MODE": "online"}, "", True),
        ({}, f"machine api.wandb.ai login user password {KEY}", False),
        ({"WANDB_BASE_URL": "https://wandb.local:8080"}, f"machine api.wandb.ai login user password {KEY}", True),
        ({"WANDB_BASE_URL": "https://wandb.local:8080"}, f"machine wandb.local login user password {KEY}", False),
        ({}, "machine", True),
    ],
)
def test_a_missing_key_is_reported_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], netrc: str, refused: bool
) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "netrc").write_text(netrc)
    for name, value in {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    track = track_of(tmp_path, "track=wandb")
    if refused:
        with raises_error("E-TRACK-008") as caught:
            trackers_of(track)
        assert KEY not in str(caught.value)
    else:
        assert list(trackers_of(track)) == ["wandb"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(client_process.importlib.util, "find_spec", lambda name: None)
    with raises_error("E-TRACK-007") as caught:
        trackers_of(track_of(tmp_path, f"track={name}"))
    assert f"[{name}]" in str(caught.value.fix)
