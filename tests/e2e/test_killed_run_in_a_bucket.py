"""A run with checkpoints in S3 is killed, and continues on a machine that has only the bucket."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from emulated_buckets import emulated_buckets

from forerun.checkpoint.log import BrokenRecord, Log
from forerun.storage.open_folder import folder_at

pytestmark = pytest.mark.timing
LIMIT_SECONDS = 300.0  # only a hang takes so long
STEPS, EVERY = 60, 4
JOB = f"""\
name: tiny
model: {{layers: 1, embed: 16, heads: 2}}
data: {{path: text.txt}}
sequence: 16
batch: 8
steps: {STEPS}
log_every: 1
device: cpu
devices: 1
checkpoint: {{every: {EVERY}}}
sample: {{tokens: 0}}
"""


def losses(run: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def test_killed_run_continues_from_s3(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A river ran past the mill and under the stone bridge.\n" * 40)
    (tmp_path / "job.yaml").write_text(JOB)

    def command(runs: str, *overrides: str) -> list[str]:
        job = [str(tmp_path / "job.yaml"), f"runs={tmp_path / runs}", *overrides]
        return [sys.executable, "-P", "-m", "forerun", "train", *job]

    subprocess.run(command("whole"), check=True, capture_output=True, timeout=LIMIT_SECONDS)
    with emulated_buckets(tmp_path) as buckets:
        address = f"{buckets.address('s3')}/killed"
        checkpoints = folder_at(f"{address}/tiny")
        with (tmp_path / "log").open("w") as output:
            process = subprocess.Popen(
                command("first", f"checkpoint.folder={address}"), stdout=output, stderr=subprocess.STDOUT
            )
            deadline = time.monotonic() + LIMIT_SECONDS
            while not (commits := Log(checkpoints).commits()):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.kill()
            assert process.wait() == -9, (tmp_path / "log").read_text()
        assert commits[-1].step < STEPS
        shutil.rmtree(tmp_path / "first")
        resumed = subprocess.run(
            command("second", f"checkpoint.folder={address}"), check=False, capture_output=True, timeout=LIMIT_SECONDS
        )
        assert resumed.returncode == 0, resumed.stderr
        assert losses(tmp_path / "second" / "tiny") == losses(tmp_path / "whole" / "tiny")
        summary = json.loads((tmp_path / "second" / "tiny" / "summary.json").read_text())
        assert 0 < summary["resumed_at"] < STEPS
        records = Log(checkpoints).records()
        assert not [record for record in records if isinstance(record, BrokenRecord)]
        kept = {commit.folder for commit in Log(checkpoints).commits()}
        assert set(checkpoints.names()) == {*kept, "commits", "files"}
