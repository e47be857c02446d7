"""The trace of a real compiled program has the step time of its plan."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import forerun
from forerun.errors import UserError

pytestmark = pytest.mark.aot

JOB = """\
model: {layers: 2, embed: 128, heads: 2, vocab: 512}
data: nothing
sequence: 128
batch: 8
micro_batch: 1
steps: 10
"""


def test_trace_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.yaml").write_text(JOB)
    plan = forerun.plan(tmp_path / "job.yaml", on="v6e-4", progress=False)
    plan.save_trace(tmp_path / "step.json.gz")
    content = json.loads(gzip.decompress((tmp_path / "step.json.gz").read_bytes()))
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    lanes: dict[str, list[dict[str, float]]] = {name: [] for name in names.values()}
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            lanes[names[event["tid"]]].append(event)
    [step] = lanes["Steps"]
    assert plan.best is not None
    assert step["dur"] / 1e6 == pytest.approx(plan.best["step_seconds"]["mid"], abs=1e-9)
    assert content["metadata"]["slice"] == "v6e-4"
    # Four devices exchange gradients or weights, and some operations come from forerun's own code.
    assert lanes["ICI collectives"]
    assert any(str(e["args"].get("source", "")).startswith("forerun/") for e in lanes["XLA Ops"])  # type: ignore[attr-defined]
    with pytest.raises(UserError) as caught:
        plan.save_trace(tmp_path / "other.json", on="v5e-1")
    assert caught.value.code == "E-PLAN-024"
