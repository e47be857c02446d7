"""Warm workers with real processes. The templates import a stand-in for the worker, which needs no compiler."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.planner.compile import shared_template, warm_workers
from forerun.planner.compile.warm_workers import ForkedWorker, LostWorker, WarmWorkers

PATIENCE_SECONDS = 300
# The template as it is, except for its modules and for what a worker does: it obeys its question.
PROGRAM = """
import json, os, sys, threading, time
from pathlib import Path
from forerun.planner.compile import template, worker

def answer(asked, folder):
    threading.Thread(target=worker._leave_with_parent, args=(folder,), daemon=True).start()
    facts = {"pid": os.getpid(), "group": os.getpgid(0), "directory": os.getcwd(), "told": os.environ.get("TOLD"),
             "template": os.getppid(), "threads": len(os.listdir("/proc/self/task"))}
    worker._write_atomically(folder / "facts.json", facts)
    if asked == "crash":
        os.abort()
    if asked == "hang":
        time.sleep(10**6)
    return 3

worker.answer = answer
template.MODULES = ()
sys.exit(template.main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:4], idle_seconds=float(os.environ["IDLE"])))
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of templates that run PROGRAM."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "stand_in_template.py").write_text(PROGRAM)
    monkeypatch.setattr(warm_workers, "MODULE", "stand_in_template")
    runtime = Path(tempfile.mkdtemp(prefix="fr-"))  # short: the path of a socket has at most 107 bytes
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *filter(None, sys.path)]))
    monkeypatch.setenv("IDLE", "600")
    return dict(os.environ)


@pytest.fixture
def workers(environment: dict[str, str]) -> Iterator[WarmWorkers]:
    made = WarmWorkers(environment, shared=False)
    yield made
    made.close()
    assert made._process is None or made._process.returncode is not None


@pytest.fixture
def shared(environment: dict[str, str]) -> Iterator[WarmWorkers]:
    """Workers of a shared template, which the test ends by its pid."""
    yield WarmWorkers(environment, shared=True)
    for one in shared_template.running_templates():
        end(one.pid)
    assert shared_template.running_templates() == []


def end(pid: int) -> None:
    handle = os.pidfd_open(pid)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    wait_for_end(handle)


def wait_for_end(handle: int) -> None:
    assert select.select([handle], [], [], PATIENCE_SECONDS)[0], "a process runs on"
    os.close(handle)


def asked(source: WarmWorkers, folder: Path, what: str = "answer", **environment: str) -> ForkedWorker:
    folder.mkdir(exist_ok=True)
    worker = source.start(
        {
            "question": what,
            "folder": str(folder),
            "environment": {**os.environ, **environment},
            "directory": str(folder),
            "plugins": None,
        }
    )
    assert worker is not None
    return worker


def exit_code(worker: ForkedWorker) -> int:
    while worker.poll() is None:
        select.select([worker._connection], [], [], PATIENCE_SECONDS)
    worker.end()
    assert worker.returncode is not None
    return worker.returncode


def facts(worker: ForkedWorker, folder: Path) -> dict[str, Any]:
    while not (folder / "facts.json").exists():
        assert worker.poll() is None
    content: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return content


def test_workers_are_forks_of_one_template(workers: WarmWorkers, tmp_path: Path) -> None:
    found = []
    for name in ("forerun-plan-a", "forerun-plan-b"):
        worker = asked(workers, tmp_path / name, TOLD=name)
        assert exit_code(worker) == 3
        found.append(json.loads((tmp_path / name / "facts.json").read_text()))
        assert worker.pid == found[-1]["pid"] == found[-1]["group"]
        assert (found[-1]["directory"], found[-1]["told"]) == (str(tmp_path / name), name)
    assert found[0]["pid"] != found[1]["pid"]
    assert found[0]["template"] == found[1]["template"] != os.getpid()


def test_a_crash_has_its_signal(workers: WarmWorkers, tmp_path: Path) -> None:
    worker = asked(workers, tmp_path / "forerun-plan-a", "crash")
    assert exit_code(worker) == -signal.SIGABRT


def test_end_kills_the_worker(workers: WarmWorkers, tmp_path: Path) -> None:
    folder = tmp_path / "forerun-plan-a"
    worker = asked(workers, folder, "hang")
    handle = os.pidfd_open(facts(worker, folder)["pid"])
    worker.end()
    wait_for_end(handle)
    assert folder.exists(), "the client removes it"
    assert exit_code(asked(workers, tmp_path / "forerun-plan-b")) == 3


def test_a_client_that_dies_leaves_nothing(workers: WarmWorkers, tmp_path: Path) -> None:
    folder = tmp_path / "forerun-plan-a"
    worker = asked(workers, folder, "hang")
    handle = os.pidfd_open(facts(worker, folder)["pid"])
    worker._connection.close()  # as if the process had been killed
    wait_for_end(handle)
    other = asked(workers, tmp_path / "forerun-plan-b")  # the template has reaped the first one before it answers
    assert exit_code(other) == 3
    while folder.exists():
        pass


def test_a_template_that_dies_before_it_forks(workers: WarmWorkers, tmp_path: Path) -> None:
    workers.prepare()
    assert workers._process is not None
    workers._process.send_signal(signal.SIGSTOP)
    worker = asked(workers, tmp_path / "forerun-plan-a", "hang")
    workers._process.kill()
    with pytest.raises(LostWorker):
        exit_code(worker)
    worker.end()


def test_a_worker_survives_its_template(workers: WarmWorkers, tmp_path: Path) -> None:
    worker = asked(workers, tmp_path / "forerun-plan-a", "hang")
    child = os.pidfd_open(facts(worker, tmp_path / "forerun-plan-a")["pid"])
    while not worker.pid:
        worker.poll()
    assert workers._process is not None
    workers._process.kill()
    workers._process.wait()
    assert worker.poll() is None
    worker.end()
    wait_for_end(child)


def test_a_command_that_dies_ends_its_template(environment: dict[str, str], tmp_path: Path) -> None:
    source = WarmWorkers(environment, shared=False)
    worker = asked(source, tmp_path / "forerun-plan-a", "hang")
    child = os.pidfd_open(facts(worker, tmp_path / "forerun-plan-a")["pid"])
    assert source._control is not None
    assert source._process is not None
    source._control.close()
    worker._connection.close()
    wait_for_end(child)
    assert source._process.wait(PATIENCE_SECONDS) == 0


def test_commands_share_a_template(shared: WarmWorkers, environment: dict[str, str], tmp_path: Path) -> None:
    templates = []
    for number, source in enumerate((shared, WarmWorkers(environment, shared=True))):
        folder = tmp_path / f"forerun-plan-{number}"
        assert exit_code(asked(source, folder)) == 3
        templates.append(json.loads((folder / "facts.json").read_text())["template"])
        source.close()
    assert templates[0] == templates[1]
    assert [one.pid for one in shared_template.running_templates()] == templates[:1]


def test_another_version_has_another_template(
    shared: WarmWorkers, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_code(asked(shared, tmp_path / "forerun-plan-a")) == 3
    monkeypatch.setattr(shared_template.metadata, "version", lambda name: "99")
    assert exit_code(asked(WarmWorkers(environment, shared=True), tmp_path / "forerun-plan-b")) == 3
    assert len(shared_template.running_templates()) == 2


def test_a_stale_socket_is_replaced(shared: WarmWorkers, environment: dict[str, str], tmp_path: Path) -> None:
    assert exit_code(asked(shared, tmp_path / "forerun-plan-a")) == 3
    (first,) = shared_template.running_templates()
    end(first.pid)
    assert len(list(shared_template.folder().glob("*.socket"))) == 1
    assert exit_code(asked(WarmWorkers(environment, shared=True), tmp_path / "forerun-plan-b")) == 3
    (second,) = shared_template.running_templates()
    assert second.pid != first.pid


def test_a_shared_template_ends_when_idle(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment["IDLE"] = "0"
    source = WarmWorkers(environment, shared=True)
    worker = asked(source, tmp_path / "forerun-plan-a", "hang")
    template = os.pidfd_open(facts(worker, tmp_path / "forerun-plan-a")["template"])
    worker.end()
    wait_for_end(template)
    assert list(shared_template.folder().glob("*.socket")) == []


def test_a_folder_that_others_can_open_is_not_used(environment: dict[str, str], tmp_path: Path) -> None:
    shared_template.private_folder().chmod(0o755)
    with pytest.raises(PermissionError):
        shared_template.private_folder()
    source = WarmWorkers(environment, shared=True)  # uses a template of its own instead
    assert exit_code(asked(source, tmp_path / "forerun-plan-a")) == 3
    assert source._process is not None
    source.close()
    assert shared_template.running_templates() == []


def test_requests_that_are_no_json_are_refused(workers: WarmWorkers, tmp_path: Path) -> None:
    workers.prepare()
    assert workers._connect is not None
    with workers._connect() as connection:
        connection.sendall(b"not json\n")
        assert connection.recv(1) == b""
    assert exit_code(asked(workers, tmp_path / "forerun-plan-a")) == 3


@pytest.mark.parametrize(
    ("variables", "is_terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"CI": "true"}, True, False),
        ({"FORERUN_WARM_WORKERS": "0"}, True, False),
        ({"FORERUN_WARM_WORKERS": "1"}, False, True),
        ({"FORERUN_WARM_WORKERS": "1", "CI": "true"}, False, True),
    ],
)
def test_who_keeps_a_template(variables: dict[str, str], is_terminal: bool, expected: bool) -> None:
    assert shared_template.is_wanted(variables, is_terminal) is expected


def test_peer_credentials_are_those_of_this_process() -> None:
    from forerun.planner.compile.template import peer_pid, peer_uid

    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert (peer_pid(ours), peer_uid(theirs)) == (os.getpid(), os.getuid())
