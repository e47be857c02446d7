"""A run that is killed and resumed appears once, and completely, in each tracker.

The clients, MLflow's server and TensorBoard's reader are real.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow_process import mlflow_process, mlflow_rows, mlflow_runs, wait_for_mlflow
from trackio_database import trackio_rows
from wandb_server import WandbServer

from forerun.track.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timing]

ROOT = Path(__file__).resolve().parents[2]
STEPS, HELD = 20, 13
PATIENCE_SECONDS = 600.0
TRIES = 3  # of the same command: the end of a run waits for a minute, and a busy machine may need more
KEY = "5ec2e7" * 6 + "beef"
JOB = f"""\
model: {{layers: 1, embed: 16, heads: 2}}
data: {{path: text.txt, feeders: 1}}
sequence: 16
batch: 8
steps: {STEPS}
device: cpu
devices: 1
log_every: 1
precision: {{compute: float32}}
remat: none
checkpoint: {{every: 5}}
sample: {{tokens: 0}}
name: tracked
track: {{to: [wandb, trackio, tensorboard, mlflow], project: letters}}
"""

Rows = list[tuple[int, float]]


def tensorboard_rows(folder: Path) -> Rows:
    read = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(folder)
    )
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars("loss")] if "loss" in read.Tags()["scalars"] else []


def wandb_rows(server: WandbServer) -> Rows:
    return [(row["_step"], row["loss"]) for run in server.runs.values() for row in run.rows()]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.05)


def test_each_tracker_has_every_row_of_a_killed_and_resumed_run_once(tmp_path: Path, shell: dict[str, str]) -> None:
    text = (ROOT / "examples" / "quickstart" / "text" / "carroll-alice.txt").read_text()
    (tmp_path / "text.txt").write_text(text[:20000])
    (tmp_path / "job.yaml").write_text(JOB)
    brake, folder = tmp_path / "brake", tmp_path / "runs" / "tracked"
    (tmp_path / "mlflow").mkdir()
    server = WandbServer(KEY)
    with server.serve() as wandb_url, mlflow_process(tmp_path / "mlflow") as mlflow_url:
        environment = {
            **shell,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests/faults/brake"), shell.get("PYTHONPATH")])),
            "FORERUN_TEST_BRAKE": str(brake),
            "JAX_PLATFORMS": "cpu",
            "WANDB_BASE_URL": wandb_url,
            "WANDB_API_KEY": KEY,
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "MLFLOW_TRACKING_URI": mlflow_url,
        }

        def start() -> subprocess.Popen[bytes]:
            with (tmp_path / "log.txt").open("ab") as log:
                words = ["forerun", "train", "job.yaml"]
                return subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=log, stderr=log)

        def mlflow_losses() -> Rows:
            runs = mlflow_runs(mlflow_url) if folder.exists() else []
            assert len(runs) <= 1
            return mlflow_rows(mlflow_url, runs[0]["info"]["run_id"], "loss") if runs else []

        def readers() -> dict[str, Callable[[], Rows]]:
            return {
                "wandb": lambda: wandb_rows(server),
                "trackio": lambda: [
                    (row["step"], row["loss"]) for row in trackio_rows(tmp_path / "trackio" / "letters.db")
                ],
                "tensorboard": lambda: tensorboard_rows(folder / "tensorboard"),
                "mlflow": mlflow_losses,
            }

        # The run waits before step 13 until it is killed. Its newest checkpoint is that of step 10.
        brake.write_text(json.dumps({"first": HELD, "last": STEPS, "step_seconds": PATIENCE_SECONDS}))
        child = start()
        wait_for_mlflow(mlflow_url)
        until(lambda: all(len(read()) >= 10 for name, read in readers().items() if name != "mlflow"))
        until(lambda: has_experiment(mlflow_url) and len(mlflow_losses()) >= 10)
        child.send_signal(signal.SIGKILL)
        child.wait()
        brake.unlink()
        for _ in range(TRIES):
            said = len((tmp_path / "log.txt").read_text())
            assert start().wait() == 0, (tmp_path / "log.txt").read_text()
            if "not have all rows" not in (tmp_path / "log.txt").read_text()[said:]:
                break

        written = [(row["step"], row["loss"]) for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
        assert [step for step, _ in written] == list(range(1, STEPS + 1))
        for name, read in readers().items():
            assert read() == written, name  # losses are float32, as in the files of TensorBoard
        assert [run["info"]["status"] for run in mlflow_runs(mlflow_url)] == ["FINISHED"]
    (run,) = server.runs.values()
    assert (run.display, run.project, run.exit_codes[-1], server.refused) == ("tracked", "letters", 0, 0)
    assert run.config["optimizer.lr"]["value"] > 0
    assert any(path.name.endswith(".wandb") for path in folder.rglob("*"))
    assert files_with(KEY, tmp_path) == []


def has_experiment(url: str) -> bool:
    try:
        return bool(mlflow_runs(url))
    except OSError:
        return False


def files_with(secret: str, folder: Path) -> list[Any]:
    """Return the files that contain a secret, as it is or in base64."""
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
