"""The line about the attention kernel that `train` prints on GPUs, and where the fastest kernel cannot run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.run_devices import attention_note


def _line(kind: str, platform: str, capability: str | None, **job: Any) -> str | None:
    model = {"layers": 2, "embed": 64, "heads": 2, "vocab": 128}
    made = Job.model_validate({"model": model, "data": "nothing", "sequence": 64, "batch": 1, "steps": 1, **job})
    device = SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    return attention_note(ResolvedJob(made), SimpleNamespace(devices=[device]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "capability", "expected"),
    [("NVIDIA H20", "9.0", "attention: cudnn"), ("NVIDIA A10G", "8.6", "attention: xla, because ")],
)
def test_a_gpu_of_no_table_has_a_kernel_by_its_capability(kind: str, capability: str, expected: str) -> None:
    line = _line(kind, "gpu", capability)
    assert line is not None
    assert line.startswith(expected)
    assert ("because" in line) == expected.endswith("because ")


def test_a_named_kernel_has_no_reason() -> None:
    assert _line("NVIDIA H20", "gpu", "9.0", attention="xla") == "attention: xla"


def test_other_devices_have_no_line() -> None:
    assert _line("TPU v5 lite", "tpu", None) is None


def test_a_split_sequence_that_splash_cannot_compute_has_a_reason() -> None:
    line = _line("TPU v5 lite", "tpu", None, mesh={"context": 2}, sequence=320)
    assert line is not None
    assert line.startswith("attention: xla, because ")
    assert "80" in line, "the length of a chunk"
    assert _line("TPU v5 lite", "tpu", None, mesh={"context": 2}, sequence=512) is None
