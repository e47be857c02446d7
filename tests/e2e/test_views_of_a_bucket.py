"""`report`, `compare`, `watch` and `runs` of a run whose checkpoints are in a bucket, against an emulator.

The commands run in a process of their own, since the drivers of buckets read the environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_buckets import emulated_buckets

PROGRAM = """
import json, sys
from forerun.cli.main import main

folder, address = sys.argv[1:]
code = main(["train", f"{folder}/job.yaml", f"checkpoint.folder={address}"])
for words in (
    ["report", f"{address}/tiny", "--html", f"{folder}/report.html"],
    ["compare", f"{address}/tiny", f"{folder}/runs/tiny"],
    ["watch", f"{address}/tiny", "--once"],
    ["runs", address, "--json"],
):
    code = code or main(words)
    print(f"== {words[0]}")
sys.exit(code)
"""
JOB = """\
name: tiny
model: {layers: 1, embed: 16, heads: 2}
data: {path: text.txt}
sequence: 16
batch: 8
steps: 6
log_every: 1
device: cpu
devices: 1
checkpoint: {every: 3}
sample: {tokens: 0}
"""


@pytest.mark.skipif(importlib.util.find_spec("gcp_storage_emulator") is None, reason="the emulator is not installed")
@pytest.mark.parametrize("protocol", ["gs", "s3"])
def test_views(tmp_path: Path, protocol: str) -> None:
    (tmp_path / "text.txt").write_text("A river ran past the mill and under the stone bridge.\n" * 40)
    (tmp_path / "job.yaml").write_text(f"{JOB}runs: {tmp_path / 'runs'}\n")
    with emulated_buckets(tmp_path) as buckets:
        address = f"{buckets.address(protocol)}/views"
        ran = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, str(tmp_path), address],
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    losses = [
        json.loads(line)["loss"] for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    ]
    final = f"{losses[-1]:.4f}"
    trained, compared, watched, listed = (part.split("\n", 1)[-1] for part in ran.stdout.split("== ")[:4])
    assert final in trained
    assert final in (tmp_path / "report.html").read_text()
    assert compared.count(final) >= 2
    assert f"loss {final}" in watched
    (entry,) = json.loads(listed)
    assert (entry["name"], entry["state"], entry["step"], entry["loss"]) == ("tiny", "finished", 6, losses[-1])
    assert entry["location"] == f"{address}/tiny"
