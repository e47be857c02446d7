"""Tests that a supervisor learns how long a save of the real loop takes."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forerun.checkpoint.log import Commit, Log
from forerun.config.schema import Job
from forerun.run.train import train
from forerun.supervise.child import WorkerProgress
from forerun.supervise.protocol.channel import MAX_BYTES, SupervisorChannel
from forerun.supervise.protocol.json_form import decode_from_worker
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import FromWorker, Saved
from forerun.supervise.worker import ProgressReporter, Worker
from forerun.supervise.worker_stop import Stop
from forerun.track.display.make_display import make_display

COMMIT_SECONDS = 0.25


@contextmanager
def supervised_worker() -> Iterator[tuple[Worker, socket.socket]]:
    """Yield a worker with a real channel, and its supervisor's end of the channel."""
    supervisor, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = SupervisorChannel(mine.detach())
    stop = Stop(channel, leave=lambda: None)
    with supervisor, channel._socket:
        yield (
            Worker(attempt=1, index=0, hosts=1, coordinator="", pulse=ProgressReporter(channel, stop), stop=stop),
            supervisor,
        )


def received(supervisor: socket.socket) -> list[FromWorker]:
    supervisor.setblocking(False)
    messages = []
    try:
        while packet := supervisor.recv(MAX_BYTES):
            messages.append(decode_from_worker(json.loads(packet)))
    except BlockingIOError:
        pass
    return messages


def test_the_supervisor_hears_the_time_from_the_start_of_a_save_to_its_commit(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Log.commit

    def slow_commit(self: Log, record: Commit) -> Any:
        time.sleep(COMMIT_SECONDS)
        return commit(self, record)

    monkeypatch.setattr(Log, "commit", slow_commit)
    # Each save waits for the one before, so two of the saves are committed before step 3 ends.
    job = make_job("steps=4", "checkpoint.every=1")
    with supervised_worker() as (worker, supervisor), make_display(io.StringIO()) as display:
        assert train(job, display, worker=worker) is not None
        messages = received(supervisor)
    progress = WorkerProgress(Limits(), 0.0)
    for message in messages:
        progress.hear(message, 1.0)
    view = progress.view(2.0, state="S", cpu_seconds=0.0, alive=True)
    assert view.step == 4
    assert view.save_seconds is not None
    assert view.save_seconds >= COMMIT_SECONDS
    assert view.save_seconds == worker.stop.save_seconds
    saves = [message.seconds for message in messages if isinstance(message, Saved)]
    assert len(saves) == len(set(saves)), "each save is reported once"
