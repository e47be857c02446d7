"""Plans of GPU machines by XLA's GPU compiler, on a machine without a GPU: memory, limit, program and clean-up."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.hardware.devices import DeviceChoice
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.compiler import Stopped
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.fork_server import ForkedWorker
from forerun.planner.compile.installed_compilers import compile_only_topology
from forerun.planner.compile.request import CompileRequest
from forerun.planner.compile.result_cache import cached_fit_result
from forerun.planner.memory import PADDING
from forerun.program.build import program_hash
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.run_devices import program_on
from forerun.units import MIB

pytestmark = pytest.mark.aot

LAYERS, EMBED, VOCAB, SEQUENCE, BATCH = 2, 512, 4096, 512, 16
SMALL = Job.model_validate(
    {
        "model": {"layers": LAYERS, "embed": EMBED, "heads": 4, "head_dim": 128, "vocab": VOCAB},
        "data": "nothing",
        "sequence": SEQUENCE,
        "batch": BATCH,
        "steps": 10,
    }
)
# 2 million tokens in one step: logits, attention and activations are far above 24 GB.
LARGE = SMALL.model_copy(update={"batch": 4096, "remat": SMALL.remat.model_copy(update={"policy": "none"})})
WARNING = re.compile(r"Can't reduce memory use below [\d.]+GiB \((\d+) bytes\)")


def request(machine: str, job: Job = SMALL) -> CompileRequest:
    return CompileRequest(ResolvedJob(job), slice_named(machine))


def asked(machine: str, job: Job = SMALL) -> FitResult:
    return compiler.ask(request(machine, job), threading.Event(), lambda phase: None)


@pytest.fixture(scope="module")
def single() -> FitResult:
    return asked("h100-1")


def test_a_small_job_fits_one_gpu(single: FitResult) -> None:
    memory = single.memory
    assert single.fits
    # float32 weights and two moments of AdamW: three equal parts, and the parameters counted by hand.
    parameters = memory.weights_bytes / 4
    blocks = LAYERS * (EMBED * 4 * 128 * 4 + 2 * EMBED)  # attention and norms; the feed-forward layers come on top
    assert parameters > VOCAB * EMBED + blocks
    assert memory.optimizer_bytes == pytest.approx(2 * memory.weights_bytes, rel=1e-4)
    assert memory.batch_bytes >= BATCH * SEQUENCE * 4
    assert memory.peak_bytes > 4 * memory.weights_bytes, "weights, two moments, and gradients"
    assert memory.host_bytes == 0
    assert single.step is not None


def test_the_ledger_adds_up(single: FitResult) -> None:
    assert sum(single.ledger.values()) == single.memory.peak_bytes
    assert PADDING not in single.ledger, "GPUs have no tiles to fill up"
    gaps = single.ledger.get("gaps between buffers", 0)
    assert 0 <= gaps < 0.02 * single.memory.peak_bytes + MIB


def test_eight_gpus_share_the_state(single: FitResult) -> None:
    answer = asked("h100-8")
    assert answer.fits
    assert answer.mesh == "1x8x1"
    assert answer.memory.weights_bytes == pytest.approx(single.memory.weights_bytes / 8, rel=0.05)
    assert sum(answer.ledger.values()) == answer.memory.peak_bytes


def test_a_job_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's own warning has the limit that it worked with. It must be the limit with which `train` runs on a GPU."""
    noise: list[str] = []
    own = compiler._with_details

    def kept(answer: FitResult, folder: Path, question: CompileRequest) -> FitResult:
        noise.append((folder / compiler.NOISE).read_text("utf-8", errors="replace"))
        return own(answer, folder, question)

    monkeypatch.setattr(compiler, "_with_details", kept)
    answer, limit = asked("4090-1", LARGE), slice_named("4090-1").chip.usable_bytes
    assert not answer.fits
    assert answer.memory.peak_bytes > limit
    assert answer.step is None
    assert sum(answer.ledger.values()) == answer.memory.peak_bytes
    warned = WARNING.search(noise[0])
    assert warned, noise[0][-2000:]
    # XLA uses 95 % of what the arguments leave of its limit, and adds the results. jaxlib sets the limit to that of its
    # allocator.
    memory = answer.memory
    arguments, results = memory.peak_bytes - memory.working_bytes, memory.weights_bytes + memory.optimizer_bytes
    assert int(warned[1]) == pytest.approx(0.95 * (limit - arguments) + results, rel=1e-5)


def trained_on(machine: str) -> Any:
    """Return the program that `train` would build on that machine."""
    devices = tuple(compile_only_topology(slice_named(machine)).devices)
    return program_on(ResolvedJob(SMALL), DeviceChoice("gpu", devices, "for the test"), None)


def test_plan_and_train_have_one_program(single: FitResult) -> None:
    command = [sys.executable, __file__, "h100-1"]  # in a new process, as a run is
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split()[-1] == single.program


def test_a_cancelled_compile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stop, children = threading.Event(), []
    own = compiler._start

    def started(*arguments: Any) -> ForkedWorker:
        children.append(own(*arguments))
        return children[0]

    monkeypatch.setattr(compiler, "_start", started)
    with pytest.raises(Stopped):
        compiler.ask(request("h100-1"), stop, lambda phase: stop.set() if phase == "compile" else None)
    assert children[0].returncode is not None
    assert list(tmp_path.iterdir()) == []


def test_a_second_plan_comes_from_the_cache(single: FitResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is asked by the GPU: an A100 with the same topology is compiled, an H100 is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[str] = []

    def remembered(question: CompileRequest, *rest: Any) -> FitResult:
        compiled.append(question.slice.name)
        return single

    monkeypatch.setattr(compiler, "ask", remembered)
    for machine in ("h100-1", "a100-80-1", "h100-1"):
        assert cached_fit_result(request(machine)).program == single.program
    assert compiled == ["h100-1", "a100-80-1"]


if __name__ == "__main__":
    print(program_hash(trained_on(sys.argv[1]).trace().lower(lowering_platforms=("cuda",))))
