"""Compilation of the train step, before the first step and with progress for the user, and the cache of compilations.

A compilation between steps would take minutes without any message. It is an error instead: see `forbid_compilation`.
"""

from __future__ import annotations

import hmac
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
from jax import monitoring
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.hardware.chips import Chip
from forerun.hardware.slices import slice_of_devices
from forerun.objectives.batch import Batch
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import step_time
from forerun.program.build import Program, program_hash
from forerun.program.compiler_options import compile_lowered
from forerun.program.schedule import Schedule
from forerun.program.state import Metrics, State
from forerun.program.step import Step
from forerun.reporter import Reporter
from forerun.run_folder.user_key import make_private, signature, user_key
from forerun.units import Bytes

CACHE_HIT = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"
MAGIC = b"forerun sealed 1\n"
SUFFIX = ".sealed"
KEY = "compile-cache.key"
_SIGNATURE_BYTES = 32
MAX_ENTRIES = 500  # of the file with the times of compilations


# JAX raises this private class for a compiled program. Functions under jit raise FloatingPointError instead.
_NAN_ERROR = "InternalFloatingPointError"


class RecompileError(Exception):
    """Something would have been compiled again during the run. The message names the argument that changed."""


@contextmanager
def count_events(*names: str) -> Iterator[dict[str, int]]:
    """Count how often JAX reports each of these monitoring events inside the block. Yields the counts by name."""
    counts = dict.fromkeys(names, 0)

    def on_event(event: str, **_: Any) -> None:
        if event in counts:
            counts[event] += 1

    def on_duration(event: str, duration_secs: float, **_: Any) -> None:
        on_event(event)

    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield counts
    finally:
        monitoring.unregister_event_listener(on_event)
        monitoring.unregister_event_duration_listener(on_duration)


class CompiledStep:
    """The compiled train step.

    Arguments with other shapes, dtypes or shardings raise `RecompileError`. `jax.jit` would compile again instead.

    Args:
      executable: the compiled program.
      program: the Program that it was compiled from.
      hash: the hash of the lowered program.
      cached: whether it came from the compile cache.
    """

    def __init__(self, executable: Any, program: Program, hash: str, cached: bool) -> None:
        self._executable = executable
        self._run: Step = executable
        self._program = program
        self._expected = {"state": program.state, "batch": program.batch}
        self.hash, self.cached = hash, cached

    def predicted_seconds(self, chip: Chip) -> float:
        """Return the seconds per step that `plan` predicts for this program on `chip`."""
        slice = slice_of_devices(chip, list(self._program.mesh.devices.flat))
        return step_time(parse(self._executable.as_text()), slice).mid_seconds

    @cached_property
    def _schedule(self) -> Schedule:
        """The schedule on the devices. It is placed at the first call: topology descriptions cannot hold arrays."""
        return self._program.placed_schedule()

    def __call__(self, state: State, batch: Batch[jax.Array]) -> tuple[State, Metrics]:
        schedule = self._schedule
        try:
            # An implicit transfer between host and devices would make each step wait. The guard makes it an error.
            with jax.transfer_guard("disallow"):
                return self._run(state, batch, schedule)
        except Exception as error:
            if type(error).__name__ == _NAN_ERROR:
                raise _nan_found(error) from error
            if not isinstance(error, TypeError | ValueError):
                raise
            changed = [
                c
                for c in (
                    difference("state", self._expected["state"], state),
                    difference("batch", self._expected["batch"], batch),
                )
                if c
            ]
            if not changed:
                raise
            raise RecompileError(f"{changed[0]}; the step is compiled once, before the first step") from error


def _nan_found(error: Exception) -> UserError:
    """Return the error for a NaN in the outputs of a step while JAX_DEBUG_NANS is set."""
    return UserError(
        "E-RUN-083",
        "a step produced a NaN or an infinity, and JAX_DEBUG_NANS or JAX_DEBUG_INFS is set",
        why=f"JAX reports {error}; the compiled step has no line numbers",
        fix="to find the operation, see docs/how-to/debugging.md#nans; without the variable, the guard skips such a "
        "step",
    )


def compile_step(program: Program, reporter: Reporter, name: str = "") -> CompiledStep:
    """Trace, lower and compile the step, and show each phase to the user.

    The reporter also shows how long the last compilation took, of this program or else of the job called `name`.
    """
    with reporter.phase("trace") as phase:
        traced = program.trace()
        inputs, outputs = jax.tree.leaves((program.state, program.batch)), jax.tree.leaves(traced.out_info)
        phase.detail = f"{_described(inputs)} in, {_described(outputs)} out"
    with reporter.phase("lower") as phase:
        lowered = traced.lower()
        hash = program_hash(lowered)
        phase.detail = f"program {hash}"
    with reporter.phase("compile") as phase, count_events(CACHE_HIT) as counts:
        times, keys = CompileTimes(), [f"program {hash}", *([f"job {name}"] if name else [])]
        phase.expected_seconds = times.expected_seconds(*keys)
        executable = compile_lowered(lowered, program.compiler_options)
        cached = counts[CACHE_HIT] > 0
        if not cached:
            times.record(phase.elapsed_seconds, *keys)
        phase.detail = f"cache {'hit' if cached else 'miss'}  {cache_folder()}"
    return CompiledStep(executable, program, hash, cached)


def _described(leaves: list[Any]) -> str:
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return f"{len(leaves)} arrays ({Bytes(size)})"


def difference(name: str, expected: Any, given: Any) -> str | None:
    """Return a description of the first leaf with another shape, dtype or sharding than expected, or None."""
    wanted = jax.tree_util.tree_flatten_with_path(expected)[0]
    got = jax.tree_util.tree_flatten_with_path(given)[0]
    if [path for path, _ in wanted] != [path for path, _ in got]:
        return f"{name} has {len(got)} arrays of another structure, compiled for {len(wanted)}"
    for (path, want), (_, have) in zip(wanted, got, strict=True):
        where = name + jax.tree_util.keystr(path)
        for what in ("shape", "dtype"):
            if getattr(want, what) != getattr(have, what):
                return f"{where}: {what} {getattr(have, what)}, compiled for {getattr(want, what)}"
        sharding = getattr(have, "sharding", None)
        if sharding is None or not sharding.is_equivalent_to(want.sharding, len(want.shape)):
            return f"{where}: sharding {sharding}, compiled for {want.sharding}"
    return None


@contextmanager
def forbid_compilation() -> Iterator[Callable[[int], None]]:
    """Yield a check for use inside the block. It raises `RecompileError` if JAX compiled anything since its start."""
    with count_events(COMPILED) as counts:

        def check(step: int) -> None:
            if counts[COMPILED]:
                raise RecompileError(f"{counts[COMPILED]} programs were compiled during step {step}")

        yield check


class CompileTimes:
    """A JSON file with the seconds of the last compilation on this machine for each key. It is informative only.

    A file that cannot be read or written is ignored: no result depends on it.
    """

    def __init__(self, path: Path | None = None) -> None:
        # It is not in the compile cache, so that clearing that keeps the times.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._path = path or cache / "forerun" / "compile_times.json"

    def expected_seconds(self, *keys: str) -> float | None:
        """Return the time of the first key that is known, or None."""
        times = self._read()
        return next((times[key] for key in keys if key in times), None)

    def record(self, seconds: float, *keys: str) -> None:
        """Store the time under all keys. The oldest entries are removed."""
        times = {key: value for key, value in self._read().items() if key not in keys}
        times |= dict.fromkeys(keys, round(seconds, 3))
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path, json.dumps(dict(list(times.items())[-MAX_ENTRIES:])) + "\n")

    def _read(self) -> dict[str, float]:
        try:
            times = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        entries = times.items() if isinstance(times, dict) else ()
        return {key: float(value) for key, value in entries if isinstance(value, int | float)}


# ---- The compile cache, whose entries are authenticated ----
#
# An entry is machine code, and JAX runs any entry that it finds. A flipped byte was observed to crash the process, or
# to remain unnoticed: with zstandard installed, JAX writes frames without a checksum. Each entry therefore has a keyed
# signature of its name and its content. An entry with a wrong signature counts as missing, and is compiled and written
# again.
#
# The key is in the user's configuration folder, not in the cache folder. A cache folder may be a mounted volume, a CI
# cache or an unpacked archive. If it contained the key, anyone who can write entries could also sign them (docs/adr,
# record 11).


def cache_folder() -> Path:
    """Return the folder of the compile cache: JAX's environment variable, or the default in the user's cache folder."""
    if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun" / "compiled"


def use_cache() -> None:
    """Enable the compile cache, whose entries are private and signed (`SealedCache`)."""
    folder = cache_folder()
    with suppress(OSError):  # JAX opens the cache later, and `_opened` then warns
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    use_sealed(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def key_file() -> Path:
    """Return the path of the key that signs compiled programs."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "forerun" / KEY


class SealedCache(CacheInterface):
    """Signed entries in one private folder. `refused` counts entries whose signature was wrong.

    Raises:
      OSError: the folder or the key cannot be used, or the key would be inside of the folder.
    """

    def __init__(self, folder: Path, key: Path | None = None) -> None:
        key = key or key_file()
        make_private(folder)
        if key.resolve().is_relative_to(folder.resolve()):
            raise OSError(f"its key {key} would be inside of it; set XDG_CONFIG_HOME to another folder")
        self._path = folder
        self._key = user_key(key)
        self.refused = 0

    def get(self, key: str) -> bytes | None:
        """Return the program that this user has stored as `key`, or None."""
        try:
            raw = self._file(key).read_bytes()
        except OSError:
            return None
        start = len(MAGIC) + _SIGNATURE_BYTES
        found, content = raw[len(MAGIC) : start], raw[start:]
        if raw.startswith(MAGIC) and hmac.compare_digest(found, signature(self._key, key, content)):
            return content
        self.refused += 1
        return None

    def put(self, key: str, value: bytes) -> None:
        """Store a program. Warn if that fails: a run can continue without a cache."""
        try:
            atomic_write(self._file(key), MAGIC + signature(self._key, key, value) + value)
        except OSError as error:
            warnings.warn(f"the compile cache {self._path} cannot be written: {error}", stacklevel=2)

    def _file(self, key: str) -> Path:
        return self._path / f"{sha256(key.encode()).hexdigest()}{SUFFIX}"


def use_sealed(folder: Path) -> None:
    """Make JAX store its compiled programs in a `SealedCache` from now on.

    JAX has no public function to set a cache. The oldest and the newest supported version create theirs with
    `get_file_cache`.
    """
    current = compilation_cache._cache
    if isinstance(current, SealedCache) and current._path == folder:
        return
    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = _opened


def _opened(path: str) -> tuple[SealedCache, str] | None:
    """Return the cache and its path for JAX. If the folder cannot be used, warn and return None: nothing is cached."""
    try:
        return SealedCache(Path(path)), path
    except OSError as error:
        warnings.warn(f"the compile cache {path} cannot be used: {error}", stacklevel=2)
        return None
