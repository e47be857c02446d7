from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from forerun.config.load import load
from forerun.hardware.devices import choose
from forerun.objectives.batch import Batch
from forerun.program.build import Program
from forerun.program.state import State
from forerun.reporter import LineReporter
from forerun.resolve.resolve_model import resolve_model
from forerun.run.compile_step import (
    CompiledStep,
    CompileTimes,
    RecompileError,
    cache_folder,
    compile_step,
    forbid_compilation,
    use_cache,
)
from forerun.run.open_data import Placement
from forerun.run.run_devices import program_on


def two_device_program(job_file: Path) -> Program:
    job = resolve_model(load(job_file, ["devices=2"]).job)
    return program_on(job, choose("cpu", 2), None)


def numpy_batch(program: Program) -> Batch[Any]:
    return jax.tree.map(lambda like: np.ones(like.shape, like.dtype), program.batch)


@pytest.fixture(scope="module")
def program(job_file: Path) -> Program:
    return two_device_program(job_file)


@pytest.fixture(scope="module")
def step(program: Program) -> CompiledStep:
    return compile_step(program, LineReporter(io.StringIO(), clock=time.monotonic))


@pytest.fixture(scope="module")
def state(program: Program) -> State:
    """For calls that are refused: an accepted one gives its buffers away."""
    return program.initial_state(0)


@pytest.fixture
def batch(program: Program) -> Batch[Any]:
    return Placement(program.batch)(numpy_batch(program))


def test_another_shape_is_named_and_nothing_is_lost(state: State, step: CompiledStep, batch: Batch[Any]) -> None:
    state = jax.tree.map(jnp.copy, state)
    short = replace(batch, tokens=batch.tokens[:, :, :8])
    with pytest.raises(RecompileError) as refused:
        step(state, short)
    assert str(refused.value) == (
        "batch.tokens: shape (1, 8, 8), compiled for (1, 8, 16); the step is compiled once, before the first step"
    )
    state, metrics = step(state, batch)  # the state was not given away to the refused call
    assert int(state.step) == 1
    assert np.isfinite(float(metrics.loss))


def test_another_dtype_of_the_batch(state: State, step: CompiledStep, batch: Batch[Any]) -> None:
    wrong = replace(batch, weights=batch.weights.astype(jnp.bfloat16))
    with pytest.raises(RecompileError, match=r"^batch\.weights: dtype bfloat16, compiled for float32;"):
        step(state, wrong)


def test_another_dtype_of_the_state(state: State, step: CompiledStep, batch: Batch[Any]) -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params)
    with pytest.raises(RecompileError, match=r"^state\.params\S*: dtype bfloat16, compiled for float32;"):
        step(replace(state, params=params), batch)


def test_another_sharding_of_the_batch(program: Program, state: State, step: CompiledStep, batch: Batch[Any]) -> None:
    whole = jax.device_put(batch.targets, NamedSharding(program.mesh, PartitionSpec()))
    with pytest.raises(RecompileError, match=r"^batch\.targets: sharding NamedSharding\(.*compiled for NamedSharding"):
        step(state, replace(batch, targets=whole))


def test_a_missing_array(state: State, step: CompiledStep, batch: Batch[Any]) -> None:
    with pytest.raises(RecompileError, match="batch has 4 arrays of another structure, compiled for 5"):
        step(state, replace(batch, positions=None))


def test_a_numpy_batch_is_not_moved_in_secret(program: Program, state: State, step: CompiledStep) -> None:
    with pytest.raises(Exception, match=r"Disallowed host-to-device transfer"):
        step(state, numpy_batch(program))


def test_any_compilation_during_the_steps_is_seen() -> None:
    numbers = jnp.arange(7)
    known = jax.jit(lambda x: x * 3)
    known(numbers)
    with forbid_compilation() as require_none:
        known(numbers)
        require_none(1)
        jax.jit(lambda x: x * 5 + 1)(numbers)
        with pytest.raises(RecompileError, match="compiled during step 2"):
            require_none(2)
    jax.jit(lambda x: x * 7 + 1)(numbers)  # after the steps everybody may compile again
    with forbid_compilation() as require_none:
        require_none(3)


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    compilation_cache.reset_cache()
    use_cache()
    yield tmp_path / "compiled"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_cache_hit_and_miss_are_told_apart(job_file: Path, private_cache: Path) -> None:
    assert private_cache.stat().st_mode & 0o077 == 0, "compiled programs are run: only their owner may write them"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    told = io.StringIO()
    display = LineReporter(told, clock=time.monotonic)
    first = compile_step(two_device_program(job_file), display)
    assert list(private_cache.iterdir())
    jax.clear_caches()
    second = compile_step(two_device_program(job_file), display)
    assert (first.cached, second.cached) == (False, True)
    assert first.hash == second.hash
    compiled = [line for line in told.getvalue().splitlines() if line.startswith("compile ") and "cache" in line]
    assert [line.split("  ")[1:] for line in compiled] == [
        ["cache miss", str(private_cache)],
        ["cache hit", str(private_cache)],
    ]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "forerun" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "forerun" / "compiled"


def test_the_first_known_key_is_the_expectation(tmp_path: Path) -> None:
    times = CompileTimes(tmp_path / "sub" / "times.json")
    assert times.expected_seconds("program a", "job x") is None
    times.record(12.5, "program a", "job x")
    times.record(20.0, "program b", "job x")
    assert times.expected_seconds("program a", "job x") == 12.5
    assert times.expected_seconds("program c", "job x") == 20.0


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"job x": "soon"}', "\xff"])
def test_a_damaged_file_is_no_expectation_and_is_written_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(content, encoding="latin-1")
    assert CompileTimes(path).expected_seconds("job x") is None
    CompileTimes(path).record(3.0, "job x")
    assert CompileTimes(path).expected_seconds("job x") == 3.0


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CompileTimes(tmp_path / "file" / "times.json").record(3.0, "job x")
    assert CompileTimes(tmp_path / "file" / "times.json").expected_seconds("job x") is None


def test_old_entries_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.run.compile_step.MAX_ENTRIES", 2)
    times = CompileTimes(tmp_path / "times.json")
    for number in range(3):
        times.record(number + 1.0, f"job {number}")
    assert [times.expected_seconds(f"job {number}") for number in range(3)] == [None, 2.0, 3.0]
