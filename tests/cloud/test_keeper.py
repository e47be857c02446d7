"""A run with a keeper survives the loss of the laptop and a preemption, and leaves nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts.site import Site, cloud_site

OMITTED = not os.environ.get("FORERUN_LONG_TESTS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(OMITTED, reason="takes minutes; FORERUN_LONG_TESTS=1 runs it"),
]

NAME, ZONE, SLICE = "kept", "us-central1-b", "v6e-8"
JOB = f"""\
name: {NAME}
model: {{layers: 1, embed: 16, heads: 2}}
data: text
sequence: 16
batch: 8
steps: 12
device: cpu
precision: {{compute: float32}}
remat: none
checkpoint: {{every: 3, folder: "gs://checkpoints/runs"}}
sample: {{tokens: 0}}
"""
SUMMARY = f"runs/{NAME}/cloud/summary.json"


def until(condition: Callable[[], object], site: Site, what: str, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} within {seconds} s\n{site.logs()}"
        time.sleep(0.2)


def test_a_keeper_replaces_a_preempted_slice_without_the_laptop(tmp_path: Path) -> None:
    with cloud_site(tmp_path, speed=1.0) as site:
        (site.laptop / "text").mkdir()
        (site.laptop / "text" / "tale.txt").write_text("It was the best of times. " * 200)
        (site.laptop / "job.yaml").write_text(JOB)
        site.hold_at(5)
        options = ["--on", SLICE, "--spot", "--zones", ZONE, "--max-usd", "20", "--yes", "--keeper", "--no-wait"]
        started = site.forerun("run", "job.yaml", *options)
        assert started.returncode == 0, f"{started.stderr}\n{site.logs()}"
        kinds = {one["name"] for one in site.cloud.resources()}
        assert f"forerun-{NAME}-keeper" in kinds
        # No process of the laptop exists from here on.
        until(lambda: _saved(site), site, "a checkpoint")
        site.cloud.preempt(f"forerun-{NAME}-1")
        site.release()
        until(lambda: site.cloud.resources() == [] and SUMMARY in site.object_names(), site, "an end of the run")
        summary = json.loads(site.read(SUMMARY))
        assert summary["end"] == "finished"
        assert [one["end"] for one in summary["attempts"]] == ["preempted", "finished"]
        bill = site.cloud.bill()
        slices = sum(usd for name, usd in bill.items() if not name.endswith("keeper"))
        assert sum(one["usd"] for one in summary["attempts"]) == pytest.approx(slices, abs=0.01)
        assert 0 < summary["actual"]["keeper_usd"] < 0.12 / 3600 * 900
        fetched = site.forerun("fetch", f"gs://checkpoints/runs/{NAME}")
        assert fetched.returncode == 0, fetched.stderr


def _saved(site: Site) -> bool:
    return any(name.startswith(f"runs/{NAME}/commits/") for name in site.object_names())
