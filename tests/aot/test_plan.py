"""`forerun plan` as people run it: real compilers, no TPU."""

from __future__ import annotations

import json
import re
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_process import run_forerun

from forerun.planner.compile.installed_compilers import GPU
from forerun.planner.memory import memory_report
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB

pytestmark = pytest.mark.aot

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "bench" / "jobs"
QWEN3_06B_PARAMETERS = 596_049_920  # as published; the embedding is tied
OUR_LINES = re.compile(r"[\w-]+: (lowering|compiling|(fits|too large) after [\d.]+ s)")
NET = '''
from dataclasses import dataclass
from forerun.models.base import Readout
from forerun.nn.spec import Normal, ParamSpec

@dataclass(frozen=True)
class Bigram:
    """The next token by the last one alone."""
    vocab: int
    width: int = 128
    heads = None

    def specs(self):
        table = ParamSpec((self.vocab, self.width), "VE", Normal(0.02))
        return {"into": table, "out": table}

    def apply(self, params, tokens_BS, segments_BS, positions_BS, compute):
        into, out = (params[name].astype(compute.dtype) for name in ("into", "out"))
        return Readout(into[tokens_BS], out)

    def flops_per_token(self, sequence):
        return 6.0 * self.vocab * self.width

class Broken(Bigram):
    def apply(self, params, *rest):
        return params["nothing"]
'''


def plan(*words: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run_forerun("plan", *words, folder=folder)


def slices_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.stdout, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["slices"]
    return rows


@pytest.fixture
def bigram(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "job.yaml").write_text(
        "model: {name: 'net:Bigram', vocab: 512}\ndata: nothing\nsequence: 256\nbatch: 16\nsteps: 10\n"
    )
    return tmp_path / "job.yaml"


def test_small_job_with_its_ledger() -> None:
    done = plan(JOBS / "qwen3-0.6b.yaml", "--on", "v5e-8", "--json")
    [row] = slices_of(done)
    assert (done.returncode, done.stderr) == (0, "")
    assert (row["slice"], row["chips"], row["devices"], row["mesh"]) == ("v5e-8", 8, 8, "1x8x1")
    assert row["fits"]
    assert row["hbm_peak_bytes"] <= 3.0 * GIB
    assert row["hbm_limit_bytes"] == 15.75 * GIB
    parts = ("weights", "optimizer", "batch", "working")
    assert sum(row[f"hbm_{part}_bytes"] for part in parts) == row["hbm_peak_bytes"]
    each = QWEN3_06B_PARAMETERS * 4 / 8
    assert each <= row["hbm_weights_bytes"] <= 1.01 * each, "float32, split over 8 devices, padding aside"
    assert 2 * each <= row["hbm_optimizer_bytes"] <= 2.02 * each, "two moments"
    arrays, tokens, size = 5, 4 * 1024, 4
    assert arrays * tokens * size <= row["hbm_batch_bytes"] <= 2 * arrays * tokens * size
    ledger = {key: size for key, size in row["hbm_ledger"].items() if key != "host_offloaded"}
    assert sum(ledger.values()) == row["hbm_peak_bytes"]
    assert ledger["batch"] == arrays * tokens * size, "without its padding"
    counters_and_norms = 64 + 4 * 64  # the guard keeps the gradient norms of 64 steps
    assert 2 * ledger["weights"] <= ledger["optimizer"] <= 2 * ledger["weights"] + counters_and_norms, "two moments"
    assert 0 < ledger["padding"] < 0.01 * row["hbm_peak_bytes"]


@pytest.mark.skipif(not any(map(find_spec, GPU.packages)), reason="jax's CUDA plugin is not installed")
def test_a_tpu_slice_and_a_gpu_machine_in_one_plan(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    shape = "{layers: 2, embed: 256, heads: 4, kv_heads: 4, head_dim: 64, mlp: 1024, vocab: 512, tied: false}"
    job.write_text(f"model: {shape}\ndata: x\nsequence: 256\nbatch: 8\nsteps: 9\n")
    done = plan(job, "--on", "v5e-1,h100-1", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["slice"]: row for row in slices_of(done)}
    assert {name: row["platform"] for name, row in rows.items()} == {"v5e-1": "tpu", "h100-1": "gpu"}
    assert rows["h100-1"]["hbm_limit_bytes"] == int(int(79.1 * GIB) * 0.9)
    embed, vocab, mlp = 256, 512, 1024
    least = 4 * (2 * vocab * embed + 2 * (4 * embed**2 + 3 * embed * mlp))  # float32, without norms
    for row in rows.values():
        assert row["fits"]
        assert row["step_seconds"]["mid"] > 0
        assert row["cost_usd"]["on_demand"] > 0
        assert row["provider"]["on_demand"]
        assert least <= row["hbm_weights_bytes"] <= 1.1 * least


def test_large_job_on_1024_chips() -> None:
    done = plan(JOBS / "llama3.1-8b-1024-chips.yaml", "--on", "v5p-2048")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("v5p-2048"))
    assert re.search(r"v5p-2048 +1024 +4x64x4 +yes +\d\.\d\d ", row)
    noise = [line for line in done.stderr.splitlines() if not OUR_LINES.fullmatch(line)]
    assert noise == [], "the compiler's own words do not reach the user"


def test_job_that_does_not_fit_beside_one_that_does(tmp_path: Path) -> None:
    job = tmp_path / "large.yaml"
    job.write_text(
        "model: {layers: 2, embed: 2048, heads: 16, vocab: 8192}\ndata: x\nsequence: 1024\nbatch: 2048\nsteps: 9\n"
    )
    done = plan(job, "--on", "v5e-8,v5p-16", "--json", "mesh.data=1")
    large, small = slices_of(done)  # what does not fit comes last
    assert done.returncode == 0, "one slice holds it"
    assert (small["fits"], large["fits"]) == (False, True)
    assert small["hbm_peak_bytes"] > small["hbm_limit_bytes"]
    alone = plan(job, "--on", "v5e-8")
    peak = small["hbm_peak_bytes"] / GIB
    assert alone.returncode == 2
    assert f"{peak - 15.75:.2f} short" in alone.stdout
    assert "[E-PLAN-017]\n" in alone.stderr
    assert f"  why: v5e-8 needs {peak:.2f} GiB per device" in alone.stderr
    assert "micro_batch=" in alone.stderr


def test_the_compilers_own_figure_is_our_peak(tmp_path: Path) -> None:
    """Its out-of-memory check compares the total of the report that we read with the limit of our table."""
    from forerun.config.schema import Job
    from forerun.hardware.slices import slice_named
    from forerun.planner.compile import compiler
    from forerun.planner.compile.fork_server import fork_server
    from forerun.planner.compile.request import CompileRequest

    model = {"layers": 2, "embed": 2048, "heads": 16, "vocab": 8192}
    job = Job.model_validate({"model": model, "data": "x", "batch": 2048, "steps": 9})
    question = CompileRequest(ResolvedJob(job), slice_named("v5e-8"))
    with fork_server() as server:
        worker = server.fork(tmp_path, question.to_json(), compiler._environment(question, tmp_path), None)
        deadline = time.monotonic() + 1200
        while worker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        worker.end()
    said = json.loads((tmp_path / "error.json").read_text())["compiler"]
    facts = json.loads((tmp_path / "facts.json").read_text())
    peak = memory_report(tmp_path, facts["arguments"]).peak_bytes
    needed, available = re.findall(r"\((\d+\.\d+)G\)", said)
    assert (needed, available) == (f"{peak / GIB:.2f}", "15.75")


@pytest.mark.parametrize("slice", ["v3-8", "tpu7x-2x2x1"])
def test_chips_of_two_devices(bigram: Path, slice: str) -> None:
    done = plan(bigram, "--on", slice)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{slice} .*1x8x1 +yes ", done.stdout)
    assert f"a chip of {slice.split('-')[0]} is two devices" in done.stdout


def test_model_beside_the_job(bigram: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = plan(bigram, "--on", "v5e-8", "--json", folder=elsewhere)
    [row] = slices_of(done)
    assert (done.returncode, row["fits"]) == (0, True)
    assert row["hbm_weights_bytes"] == 2 * 512 * 128 * 4 / 8


def test_broken_model_beside_the_job(bigram: Path) -> None:
    done = plan(bigram, "--on", "v5e-8", "model.name=net:Broken")
    assert done.returncode == 2
    assert re.search(r"v5e-8: .*'net:Broken'.*\[E-PLAN-007\]\n  why: KeyError: 'nothing'", done.stderr)
    assert f"{bigram.parent / 'net.py'}, line 26" in done.stderr
    assert "Traceback" not in done.stderr


def test_accumulation_with_an_untied_head(tmp_path: Path) -> None:
    """The compiler moves reductions out of the accumulating loop, and fails where it meets one it does not expect."""
    job = tmp_path / "untied.yaml"
    sizes = "{layers: 2, embed: 256, heads: 4, vocab: 512, tied: false}"
    job.write_text(f"model: {sizes}\ndata: x\nsequence: 256\nbatch: 16\nmicro_batch: 1\nsteps: 9\n")
    done = plan(job, "--on", "v5e-8", "--json")
    assert (done.returncode, done.stderr) == (0, "")


def test_only_the_devices_that_the_job_asks_for(bigram: Path) -> None:
    [row] = slices_of(plan(bigram, "devices=1", "batch=8", "--on", "v3-8", "--json", folder=bigram.parent))
    assert (row["mesh"], row["devices"], row["devices_used"]) == ("1x1x1", 8, 1)
    weights = 2 * 512 * 128 * 4
    assert weights <= row["hbm_weights_bytes"] < 2 * weights, "one device holds all of them"
