from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.config.schema import Job
from forerun.reporter import LineReporter
from forerun.run import train as loop
from forerun.track import forwarder
from forerun.track.metrics import read_metrics

pytestmark = pytest.mark.timing

MakeJob = Callable[..., Job]


def test_a_run_whose_tracker_is_down_is_the_same_run(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is always heard, however late the thread comes to it; only the server that hangs is not waited for."""
    monkeypatch.setattr(forwarder, "END_SECONDS", 120.0)
    rows = {}
    with socket.socket() as deaf:  # connections are taken by the kernel, and nobody answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        lines = io.StringIO()
        for name, track in (("without", ()), ("down", ("track=mlflow", "track.url=http://127.0.0.1:1"))):
            lines = io.StringIO()
            job = make_job(f"name={name}", *track)
            assert loop.train(job, LineReporter(lines, clock=time.monotonic)) is not None
            rows[name] = [(row["step"], row["loss"]) for row in read_metrics(Path(job.runs) / name / "metrics.jsonl")]
        monkeypatch.setattr(forwarder, "END_SECONDS", 0.2)
        hangs = make_job("name=down", "track=mlflow", f"track.url=http://127.0.0.1:{deaf.getsockname()[1]}")
        told = io.StringIO()
        assert loop.train(hangs, LineReporter(told, clock=time.monotonic)) is not None
    assert rows["down"] == rows["without"]
    assert "warning: mlflow does not accept rows" in lines.getvalue()
    assert "nothing was delivered" in lines.getvalue()
    assert "the same command sends the rest" in told.getvalue()
