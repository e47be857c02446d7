"""Plan what you train: `plan` and `train` lower the same program for the same job and devices."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from forerun.config.schema import Job
from forerun.hardware.chips import chip_named
from forerun.hardware.devices import DeviceChoice
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import step_time
from forerun.planner.time.step_time import calibration
from forerun.program.build import program_hash
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.compile_step import CompiledStep
from forerun.run.run_devices import program_on

pytestmark = pytest.mark.aot

JOB = Job.model_validate(
    {
        "model": {"layers": 2, "embed": 256, "heads": 4, "head_dim": 128, "vocab": 512},
        "data": "nothing",
        "sequence": 256,
        "batch": 16,
        "micro_batch": 1,
        "steps": 10,
    }
)


def trained_on(slice_name: str, job: Job = JOB) -> Any:
    """What `train` would build if it stood on that slice."""
    wanted = slice_named(slice_name)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=wanted.topology, **wanted.topology_options)
    return program_on(ResolvedJob(job), DeviceChoice("tpu", tuple(topology.devices), "for the test"), None)


@pytest.mark.parametrize("slice_name", ["v5e-8"])
def test_plan_and_train_have_one_program(slice_name: str) -> None:
    answer = compiler.ask(
        CompileRequest(ResolvedJob(JOB), slice_named(slice_name)), threading.Event(), lambda phase: None
    )
    assert hash_in_a_new_process(JOB, slice_name) == answer.program
    changed = JOB.model_copy(update={"optimizer": JOB.optimizer.model_copy(update={"b1": 0.5})})
    assert hash_in_a_new_process(changed, slice_name) != answer.program


def hash_in_a_new_process(job: Job, slice_name: str) -> str:
    """As a run is: in one process a second trace finds arrays of the first, and makes them constants."""
    command = [sys.executable, __file__, job.model_dump_json(), slice_name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


@pytest.mark.slow
def test_train_predicts_what_plan_predicts(tmp_path: Path) -> None:
    """The executable's own text gives the step time of the early dump, and calibration brings back a known factor."""
    program = trained_on("v5e-8")
    jax.config.update("jax_enable_compilation_cache", False)  # what is for a TPU elsewhere cannot be read back
    try:
        executable = program.trace().lower().compile(compiler_options=program.compiler_options)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    mine = CompiledStep(executable, program, "0", False).predicted_seconds(chip_named("v5e"))
    answer = compiler.ask(CompileRequest(ResolvedJob(JOB), slice_named("v5e-8")), threading.Event(), lambda phase: None)
    assert answer.step is not None
    assert mine == pytest.approx(answer.step.mid_seconds, rel=0.05)
    for name, factor in (("a", 1.1), ("b", 1.3), ("c", 1.2)):
        summary = {"predicted_step_seconds": mine, "step_seconds": factor * mine, "device": {"chip": "v5e"}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    found = calibration([str(tmp_path / name) for name in "abc"])
    assert found.applied(answer.step, "v5e").mid_seconds == pytest.approx(1.2 * answer.step.mid_seconds)
    assert found.applied(answer.step, "v6e") == answer.step
    assert step_time(parse(executable.as_text()), slice_named("v5e-8")).mid_seconds == mine


if __name__ == "__main__":
    print(program_hash(trained_on(sys.argv[2], Job.model_validate_json(sys.argv[1])).trace().lower()))
