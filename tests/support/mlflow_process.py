"""MLflow's own server as a process, with a SQLite database."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 300.0


@contextmanager
def mlflow_process(folder: Path) -> Iterator[str]:
    """Start the server, which imports for ten seconds. Yield its address immediately, and stop the server at the end.

    This is the application that `mlflow server` starts. That command also starts a process for jobs, which outlives it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder / 'mlflow.db'}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder / "artifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-P", "-m", "uvicorn", "mlflow.server.fastapi_app:app"]
    with (folder / "mlflow.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--log-level", "warning"], env=environment, stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def wait_for_mlflow(url: str) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)


def mlflow_runs(url: str, experiment: str = "forerun") -> list[dict[str, Any]]:
    """Return the runs of an experiment."""
    found = _ask(f"{url}/api/2.0/mlflow/experiments/get-by-name?experiment_name={experiment}")
    body = json.dumps({"experiment_ids": [found["experiment"]["experiment_id"]]}).encode()
    return list(_ask(f"{url}/api/2.0/mlflow/runs/search", body).get("runs", []))


def mlflow_rows(url: str, run_id: str, key: str) -> list[tuple[int, float]]:
    """Return all stored (step, value) of a metric, sorted by step."""
    route = f"{url}/api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key={key}"
    return sorted((int(metric.get("step", 0)), metric["value"]) for metric in _ask(route).get("metrics", []))


def _ask(address: str, body: bytes | None = None) -> dict[str, Any]:
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.loads(answer.read()))
