"""The fork server with real processes. It imports a stand-in for the worker, which needs no compiler."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.planner.compile import fork_server
from forerun.planner.compile.fork_server import ForkedWorker, ForkServer

PATIENCE_SECONDS = 300
# The server as it is, except for its modules and for what a worker does: it obeys its question.
SERVER = """
import json, os, sys, threading, time
from forerun.planner.compile import fork_server, worker

def answer(asked, folder):
    threading.Thread(target=worker._end_with_command, args=(folder,), daemon=True).start()
    names = ("TOLD", "JAX_PLATFORMS", "PYTHONPATH", "OPENBLAS_NUM_THREADS")
    facts = {"pid": os.getpid(), "group": os.getpgid(0), "directory": os.getcwd(), "server": os.getppid()}
    worker._write_atomically(folder / "facts.json", facts | {name: os.environ.get(name) for name in names})
    print("noise", file=sys.stderr)
    if asked == "crash":
        os.abort()
    if asked == "fail":
        raise ValueError("no")
    if asked == "hang":
        time.sleep(10**6)
    return 3

worker.answer = answer
fork_server.MODULES = ("a_module_that_does_not_exist",)
fork_server.main(int(sys.argv[1]))
"""
# A command with two workers that hang. It reads the messages of the server about the first one, not about the second.
COMMAND = """
import json, sys, time
from pathlib import Path
from forerun.planner.compile import fork_server

fork_server.COMMAND = (sys.executable, "-P", sys.argv[1])
with fork_server.fork_server() as server:
    for name in ("polled", "unread"):
        folder = Path(sys.argv[2], name)
        folder.mkdir()
        worker = server.fork(folder, "hang", {}, None)
        while not (folder / "facts.json").exists():
            if name == "polled":
                worker.poll()
            time.sleep(0.01)
        print(json.loads((folder / "facts.json").read_text())["pid"], flush=True)
    print(server._process.pid, flush=True)
    time.sleep(10**6)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's script, which `ForkServer` starts."""
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    monkeypatch.setattr(fork_server, "COMMAND", (sys.executable, "-P", str(path)))
    return path


@pytest.fixture
def server(script: Path) -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()
    assert server._process is None or server._process.returncode is not None


def forked(server: ForkServer, folder: Path, question: str = "answer", **environment: str) -> ForkedWorker:
    folder.mkdir()
    return server.fork(folder, question, environment, None)


def exit_code(worker: ForkedWorker) -> int:
    while worker.poll() is None:
        select.select([worker._connection], [], [], PATIENCE_SECONDS)
    worker.end()
    assert worker.returncode is not None
    return worker.returncode


def facts(worker: ForkedWorker, folder: Path) -> dict[str, Any]:
    """Return what a worker that hangs says about itself."""
    while not (folder / "facts.json").exists():
        assert worker.poll() is None
    content: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return content


def wait_for_end(pidfd: int) -> None:
    assert select.select([pidfd], [], [], PATIENCE_SECONDS)[0], "a process still runs"
    os.close(pidfd)


def test_workers_are_forks_of_one_server(server: ForkServer, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        worker = forked(server, tmp_path / name, TOLD=name)
        assert exit_code(worker) == 3
        found.append(json.loads((tmp_path / name / "facts.json").read_text()))
        assert worker.pid == found[-1]["pid"] == found[-1]["group"]
        assert (found[-1]["directory"], found[-1]["TOLD"]) == (os.getcwd(), name)
        assert (tmp_path / name / fork_server.NOISE).read_text() == "noise\n"
    assert found[0]["pid"] != found[1]["pid"]
    assert server._process is not None
    assert found[0]["server"] == found[1]["server"] == server._process.pid
    assert (found[0]["JAX_PLATFORMS"], found[0]["OPENBLAS_NUM_THREADS"]) == ("cpu", "1")
    assert found[0]["PYTHONPATH"].split(os.pathsep) == [entry for entry in sys.path if entry]


@pytest.mark.parametrize(("question", "code"), [("crash", -signal.SIGABRT), ("fail", fork_server.FAILED)])
def test_a_worker_that_fails_has_its_exit_code(server: ForkServer, tmp_path: Path, question: str, code: int) -> None:
    assert exit_code(forked(server, tmp_path / "a", question)) == code
    assert ("ValueError: no" in (tmp_path / "a" / fork_server.NOISE).read_text()) == (question == "fail")


def test_end_kills_the_worker(server: ForkServer, tmp_path: Path) -> None:
    worker = forked(server, tmp_path / "a", "hang")
    pidfd = os.pidfd_open(facts(worker, tmp_path / "a")["pid"])
    worker.end()
    assert worker.returncode == -signal.SIGKILL
    wait_for_end(pidfd)
    assert (tmp_path / "a").exists(), "the command removes it"
    assert exit_code(forked(server, tmp_path / "b")) == 3


def test_a_worker_that_was_ended_before_its_fork_ends_on_its_own(server: ForkServer, tmp_path: Path) -> None:
    server.start()
    assert server._process is not None
    server._process.send_signal(signal.SIGSTOP)
    worker = forked(server, tmp_path / "a", "hang")
    worker.end()
    server._process.send_signal(signal.SIGCONT)
    while (tmp_path / "a").exists():  # the worker removes it when its connection is closed
        pass
    assert exit_code(forked(server, tmp_path / "b")) == 3


def test_a_server_that_is_killed_before_its_fork_counts_as_the_worker(server: ForkServer, tmp_path: Path) -> None:
    server.start()
    assert server._process is not None
    server._process.send_signal(signal.SIGSTOP)
    worker = forked(server, tmp_path / "a", "hang")
    server._process.kill()
    assert exit_code(worker) == -signal.SIGKILL
    assert exit_code(forked(server, tmp_path / "b")) == -signal.SIGKILL
    assert (tmp_path / "b" / fork_server.NOISE).read_text() == ""


def test_a_worker_survives_its_server(server: ForkServer, tmp_path: Path) -> None:
    worker = forked(server, tmp_path / "a", "hang")
    pidfd = os.pidfd_open(facts(worker, tmp_path / "a")["pid"])
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    assert worker.poll() is None
    worker.end()
    wait_for_end(pidfd)


def test_a_killed_command_leaves_no_process(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    folder.mkdir()
    command = [sys.executable, "-c", COMMAND, str(script), str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pidfds = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(3)]
        parent.kill()
    for pidfd in pidfds:
        wait_for_end(pidfd)
    while list(folder.iterdir()):
        pass


def test_blocks_that_overlap_share_a_server_until_the_last_one_ends(script: Path, tmp_path: Path) -> None:
    may_end, entered = threading.Event(), threading.Event()
    servers: list[ForkServer] = []

    def other_block() -> None:
        with fork_server.fork_server() as server:
            servers.append(server)
            entered.set()
            may_end.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=other_block)
    with fork_server.fork_server() as server:
        thread.start()
        assert entered.wait(PATIENCE_SECONDS)
        server.start()
    assert servers == [server]
    assert exit_code(forked(server, tmp_path / "a")) == 3
    may_end.set()
    thread.join()
    assert server._process is not None
    assert server._process.returncode is not None
    with fork_server.fork_server() as later:
        assert later is not server
