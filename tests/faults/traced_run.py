"""Train a tiny job whose batch of step 3 is not a number, in the folder given as the argument.

Its system calls are traced by `test_run_files_sync.py`.
"""

from __future__ import annotations

import io
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # the program runs for milliseconds and compiles for seconds

import numpy as np

from forerun.config.load import load
from forerun.reporter import LineReporter
from forerun.run import train as loop

BAD_STEP = 3
JOB = """\
name: run
runs: .
model: {layers: 1, embed: 16, heads: 2}
data: {path: text, ledger: true}
sequence: 16
batch: 8
steps: 4
device: cpu
devices: 1
precision: {compute: float32}
remat: none
checkpoint: {every: 2}
sample: {tokens: 0}
"""


class BadBatch:
    def __init__(self, batches: Any) -> None:
        self._batches, self.examples_at = batches, batches.examples_at

    def batch_at(self, index: int) -> Any:
        batch = self._batches.batch_at(index)
        return replace(batch, weights=np.full_like(batch.weights, np.nan)) if index + 1 == BAD_STEP else batch


def main(folder: Path) -> None:
    (folder / "text").mkdir()
    (folder / "text" / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    (folder / "job.yaml").write_text(JOB)
    real = loop.batches_of
    loop.batches_of = lambda *given: BadBatch(real(*given))  # type: ignore[assignment,return-value]
    job = load(folder / "job.yaml", [f"runs={folder}"]).job
    assert loop.train(job, LineReporter(io.StringIO(), clock=time.monotonic)) is not None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
