"""A process that writes metrics and forwards them to trackers, as a run does, without training.

Usage: `tracked_run.py FOLDER RESUME_AT WRITTEN LAST SETTING...`. It writes the rows after RESUME_AT up to WRITTEN. If
WRITTEN is less than LAST, the process then waits until it is killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from forerun.config.load import load
from forerun.reporter import LineReporter
from forerun.track import forwarder
from forerun.track.backends import client_process
from forerun.track.backends.client_process import ClientProcess
from forerun.track.forwarder import tracking
from forerun.track.metrics import MetricsLog

JOB = "model: qwen3-0.6b\ndata: texts\nname: one\n"


def row_of(step: int) -> dict[str, Any]:
    """Return the metrics of a step. Each fifth step has a sample, and each seventh has a loss that is not finite."""
    row: dict[str, Any] = {"loss": None if step % 7 == 0 else 10 / step, "goodput": 0.5, "lost_compile": step / 1000}
    return row | ({"samples": [{"prompt": "<a>", "text": f"b{step}"}]} if step % 5 == 0 else {})


def main(folder: Path, resume_at: int, written: int, last: int, *settings: str) -> None:
    """Write rows, and forward them."""
    forwarder.POLL_SECONDS = 0.05
    ClientProcess.end_seconds = client_process.END_SECONDS = 300.0  # a busy machine imports a client for a minute
    (folder / "job.yaml").write_text(JOB)
    job = load(folder / "job.yaml", settings).job
    path = folder / "metrics.jsonl"
    with MetricsLog(path, resume_at=resume_at) as log, tracking(job, path, last, LineReporter(sys.stdout)):
        for step in range(resume_at + 1, written + 1):
            log.write(step, **row_of(step))
        while written < last:
            time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
