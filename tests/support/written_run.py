"""A run's folder that a test writes line by line, as a training process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.config.load import dump, load
from forerun.supervise.run_lock import RunHolder, lock_file

JOB = "model: {layers: 1, embed: 16, heads: 2}\ndata: text\nsteps: 20\n"
START = 1_000_000.0  # Unix time of the first step; each step takes 2 s


class WrittenRun:
    """A run of 20 steps in `parent/name`."""

    def __init__(self, parent: Path, name: str = "short") -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self.path = parent / name
        self.path.mkdir()
        job = parent.parent / f"{name}.yaml"
        job.write_text(f"{JOB}name: {name}\n")
        (self.path / "job.yaml").write_text(dump(load(job).job))

    def append(self, file: str, *rows: dict[str, Any]) -> None:
        with (self.path / file).open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)

    def steps(self, first: int, last: int) -> None:
        """Append rows of steps. The loss of step n is 4 - n / 10, and its time is `START` + 2 n."""
        self.append("metrics.jsonl", *(row(step) for step in range(first, last + 1)))

    def event(self, event: str, seconds: float, **about: Any) -> None:
        self.append("events.jsonl", {"unix_seconds": START + seconds, "event": event, "session": 1, **about})

    def write(self, file: str, content: Any) -> None:
        (self.path / file).write_text(json.dumps(content))

    def lock(self) -> None:
        """Write the lock of this process, as a training process has it."""
        holder = RunHolder.this_process()
        content = {"pid": holder.pid, "host": holder.host, "started": holder.started}
        lock_file(self.path).write_text(json.dumps(content))


def row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 4 - step / 10,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "step_seconds": 2.0,
        "wait_share": 0.125,
        "tokens_per_second": 4200.0,
        "mfu": 0.375,
        "hbm_bytes": 3 << 30,
        "hbm_peak_bytes": 5 << 30,
        "unix_seconds": START + 2 * step,
    }
