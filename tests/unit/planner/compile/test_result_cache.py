"""Verdicts on disk: the same program hits, anything that could change it misses, damage is no obstacle."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fit_results import fit_result, request

from forerun.hardware.slices import slice_named
from forerun.planner.compile import result_cache
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.planner.time.step_time import StepTime
from forerun.units import GIB, Bytes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "forerun" / "verdicts"


def question(on: str = "v5e-8", **values: object) -> CompileRequest:
    return request(on, **{"batch": 32, **values})


def verdict_of(asked: CompileRequest, step: StepTime | None = None) -> FitResult:
    ledger = {"weights": Bytes(GIB), "optimizer": Bytes(2 * GIB)}
    return fit_result(asked, None, (8, 1, 2, 0.5, 3), fits=step is not None, step=step, ledger=ledger)


@pytest.mark.parametrize("step", [StepTime(0.25, {"matmul": 0.2, "collectives not hidden": 0.05}), None])
def test_round_trip(step: StepTime | None, folder: Path) -> None:
    asked = question()
    assert result_cache.recall(asked) is None
    told = verdict_of(asked, step)
    result_cache.remember(told)
    known = result_cache.recall(asked)
    assert known == told
    assert isinstance(known, FitResult)
    assert str(known.memory.peak_bytes) == "8.00 GiB"
    assert str(known.ledger["weights"]) == "1.00 GiB"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".json"]


SAME = [
    {"name": "other"},
    {"seed": 7},
    {"data": "elsewhere"},
    {"checkpoint": {"every": 3}},
    {"steps": 6},
    {"optimizer": {"lr": 1e-3, "warmup": 7, "final_lr": 0.5, "weight_decay": 0.0}},
    {"mesh": {"fsdp": 8}},
    {"micro_batch": 4},
    {"model": {"name": "qwen3-0.6b", "layers": 28}},
]
DIFFERENT = [
    {"batch": 64},
    {"sequence": 2048},
    {"micro_batch": 2},
    {"mesh": {"tp": 2}},
    {"remat": "none"},
    {"optimizer": {"b1": 0.8}},
    {"optimizer": {"schedule": "linear"}},
    {"model": "smollm2-135m"},
    {"attention": "xla"},
    {"loss_chunk": 128},
]


@pytest.mark.parametrize("values", SAME, ids=str)
def test_what_does_not_reach_the_program_hits(values: dict[str, object]) -> None:
    assert result_cache.key(question(**values)) == result_cache.key(question())


@pytest.mark.parametrize("values", DIFFERENT, ids=str)
def test_what_reaches_the_program_misses(values: dict[str, object]) -> None:
    assert result_cache.key(question(**values)) != result_cache.key(question())


def test_slice_versions_flags_and_source_count(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {result_cache.key(question()), result_cache.key(question("v6e-8"))}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1")
    keys.add(result_cache.key(question()))
    monkeypatch.setattr(result_cache, "_versions", lambda platform: {"libtpu": "0.0.1"})
    keys.add(result_cache.key(question()))
    monkeypatch.setattr(result_cache, "_own_source", lambda: "edited")
    keys.add(result_cache.key(question()))
    assert len(keys) == 5


def test_gpus_with_the_same_topology_have_different_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = ("h100-8", "h200-8", "a100-80-8", "h100-4", "h100-8x2")
    assert slice_named("h100-8").topology == slice_named("a100-80-8").topology
    keys = {result_cache.key(question(name)) for name in machines}
    assert len(keys) == len(machines)
    one = question("h100-8")
    less = replace(one, slice=replace(one.slice, chip=replace(one.slice.chip, usable_bytes=GIB)))
    keys.add(result_cache.key(less))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_memory_limit_slop_factor=90")
    keys.add(result_cache.key(one))
    assert len(keys) == len(machines) + 2


def test_a_platform_has_the_versions_of_its_own_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache.metadata, "version", lambda name: name)
    assert {"jax-cuda13-plugin", "jax-cuda13-pjrt"} <= set(result_cache._versions.__wrapped__("gpu"))
    assert "libtpu" not in result_cache._versions.__wrapped__("gpu")
    assert "libtpu" in result_cache._versions.__wrapped__("tpu")


def test_source_that_counts() -> None:
    counted = {str(path.relative_to(result_cache.SOURCE)) for path in result_cache._source_files()}
    assert {"nn/attention.py", "program/step.py", "planner/time/simulation.py", "hardware/tables/chips.csv"} <= counted
    assert {"config/schema.py", "planner/compile/compiler.py", "planner/compile/worker.py"} <= counted
    assert (
        not {"planner/report/table.py", "planner/search/search.py", "hardware/tables/prices.csv", "cli/plan.py"}
        & counted
    )


def test_a_model_of_the_users_own_counts_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ownnet.py").write_text("class Net: ...\n")
    asked = question(model={"name": "ownnet:Net", "vocab": 128})
    before = result_cache.key(asked)
    assert result_cache.key(asked) == before
    (tmp_path / "ownnet.py").write_text("class Net: pass\n")
    assert result_cache.key(asked) != before


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"verdict": {}}', '{"verdict": {"memory": 3}}', "\x00\xff"])
def test_a_damaged_entry_is_ignored_and_rewritten(damage: str, folder: Path) -> None:
    told = verdict_of(question())
    result_cache.remember(told)
    [path] = folder.iterdir()
    path.write_bytes(damage.encode("latin-1"))
    assert result_cache.recall(told.question) is None
    result_cache.remember(told)
    assert result_cache.recall(told.question) == told


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result_cache.remember(verdict_of(question()))
    assert result_cache.recall(question()) is None


def test_cached_verdict_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[CompileRequest] = []

    def compiled(question: CompileRequest, stop: threading.Event | None, *rest: object) -> FitResult:
        asked.append(question)
        return verdict_of(question, StepTime(1.0, {"matmul": 1.0}))

    monkeypatch.setattr(result_cache, "verdict", compiled)
    first = result_cache.cached_fit_result(question())
    again = result_cache.cached_fit_result(question(name="renamed"))
    assert len(asked) == 1
    assert again == replace(first, question=question(name="renamed"))


def test_failures_are_remembered_apart() -> None:
    result_cache.store_failure(question(), "RET_CHECK")
    assert result_cache.recall(question()) is None
    assert result_cache.load_failure(question()) == "RET_CHECK"
    assert result_cache.load_failure(question(batch=64)) is None


def test_a_hit_needs_no_jax(tmp_path: Path) -> None:
    told = verdict_of(question())
    result_cache.remember(told)
    text = json.dumps(told.question.to_json())
    program = f"""
import sys
from forerun.planner.compile.request import from_json
from forerun.planner.compile.result_cache import cached_fit_result
assert cached_fit_result(from_json({text})).program == "0123456789ab"
assert "jax" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
