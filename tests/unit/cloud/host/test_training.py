"""The note of an agent about a program that is not the planned one."""

from __future__ import annotations

import subprocess
import sys

from forerun.cloud.host.training import planned_program, program_note
from forerun.cloud.record.entries import Option
from forerun.report.differences import ProgramFacts

OPTION = Option("tpu", "v6e-8", "us-east5-b", "spot", 1, 21.6, program="aaaaaaaaaaaa")


def test_the_note_names_the_device_and_the_version() -> None:
    planned = planned_program(OPTION, {"jax": "0.10.2"})
    assert planned is not None
    assert (planned.device, planned.devices) == ("v6e", 8)
    assert program_note(planned, None) == ""
    assert program_note(planned, ProgramFacts("aaaaaaaaaaaa", "v6e", 8)) == ""
    note = program_note(planned, ProgramFacts("bbbbbbbbbbbb", "cpu", 4, versions={"jax": "0.10.1"}))
    for word in ("aaaaaaaaaaaa", "bbbbbbbbbbbb", "v6e", "cpu", "0.10.1", "0.10.2"):
        assert word in note


def test_a_gpu_machine_has_no_slice() -> None:
    option = Option("compute", "a3-highgpu-8g", "us-east5-b", "spot", 1, 21.6, program="aaaaaaaaaaaa")
    assert planned_program(option, {}) == ProgramFacts("aaaaaaaaaaaa")
    assert planned_program(Option("tpu", "v6e-8", "z", "spot", 1, 1.0), {}) is None


def test_the_agent_does_not_import_jax() -> None:
    """jax would open the TPU, which belongs to the training process."""
    code = "import sys, forerun.cloud.host.start, forerun.cloud.host.__main__; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
