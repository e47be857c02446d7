"""The values of a sweep: `optimizer.lr=1e-5,3e-5 seed=0,1` becomes four runs."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.config.load import LoadedJob, load
from forerun.config.merge import COMMAND_LINE
from forerun.config.schema import Job
from forerun.config.source import read_value
from forerun.errors import UserError

MAX_RUNS = 1000
MAX_NAME = 80
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "'\""


@dataclass(frozen=True)
class Axis:
    """A key of the job and its values, as the user wrote them."""

    key: str
    texts: tuple[str, ...]

    @property
    def values(self) -> tuple[Any, ...]:
        """The values as YAML reads them."""
        return tuple(read_value(text, f"{COMMAND_LINE}: {self.key}={text}") for text in self.texts)


@dataclass(frozen=True)
class SweepGrid:
    """The axes of a sweep, and the overrides that all its runs share."""

    axes: tuple[Axis, ...]
    fixed: tuple[str, ...]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its job, its values by key, and the overrides that produce the job."""

    job: Job = field(repr=False)
    values: Mapping[str, Any]
    overrides: tuple[str, ...] = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the job of the run."""
        return self.job.name

    @property
    def label(self) -> str:
        """The values as text, such as `optimizer.lr=1e-05 seed=0`."""
        return " ".join(f"{key}={value_text(value)}" for key, value in self.values.items())


def read_grid(words: Sequence[str]) -> SweepGrid:
    """Return the axes and the other overrides of a command line.

    Raises:
      UserError: no word has several values, or a word is malformed.
    """
    axes: list[Axis] = []
    fixed: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        texts = split_values(text) if equals else []
        if len(texts) < 2:
            fixed.append(word)
            continue
        _require_axis(key, texts, [axis.key for axis in axes])
        axes.append(Axis(key, tuple(texts)))
    if not axes:
        raise UserError(
            "E-JOB-130",
            "a sweep needs a key with several values",
            why=f"given: {' '.join(words) or 'no key at all'}; a list in brackets is one value",
            fix="separate values by commas: optimizer.lr=1e-5,3e-5 seed=0,1; for a single run use forerun train",
        )
    return SweepGrid(tuple(axes), tuple(fixed))


def split_values(text: str) -> list[str]:
    """Return the values that commas separate. Commas in brackets or quotes do not separate: `[1,2],3` is two values."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES and not parts[-1].strip():
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth = max(0, depth - 1)
        elif character == "," and not depth:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts]


def runs_of(path: Path, grid: SweepGrid) -> tuple[LoadedJob, list[SweepRun]]:
    """Return the job that all runs share, and one checked run for each combination of values.

    The last axis changes first. The runs are in a folder of the sweep, so that their names cannot collide with others.

    Raises:
      UserError: a combination is not a valid job, or there are too many.
    """
    combinations = list(itertools.product(*(zip(axis.texts, axis.values, strict=True) for axis in grid.axes)))
    if len(combinations) > MAX_RUNS:
        raise UserError(
            "E-JOB-131",
            f"the sweep has {len(combinations)} runs",
            why=f"at most {MAX_RUNS} are allowed: " + " x ".join(str(len(axis.texts)) for axis in grid.axes),
            fix="remove values, or start several sweeps with different names (name=...)",
        )
    base = load(path, grid.fixed)
    folder = folder_of_sweep(base.job)
    names = _short_names([axis.key for axis in grid.axes])
    found = []
    for combination in combinations:
        pairs = list(zip(grid.axes, combination, strict=True))
        values = {axis.key: value for axis, (_, value) in pairs}
        suffix = "-".join(f"{names[key]}-{value_text(value)}" for key, value in values.items())
        overrides = (
            *grid.fixed,
            *(f"{axis.key}={text}" for axis, (text, _) in pairs),
            f"name={_run_name(base.job.name, suffix)}",
            f"runs={folder}",
        )
        found.append(SweepRun(load(path, overrides).job, values, overrides))
    return base, found


def folder_of_sweep(job: Job) -> Path:
    """Return the folder of a sweep over `job`, which contains its runs and its report."""
    return Path(job.runs).absolute() / f"{job.name}-sweep"


def value_text(value: Any) -> str:
    """Return a value for tables and names. Equal numbers have equal texts: 1e-5 and 0.00001 are `1e-05`."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _require_axis(key: str, texts: Sequence[str], before: Sequence[str]) -> None:
    """Raise if the key cannot be swept, or one of its values is empty or occurs twice."""
    problem = ""
    if key in ("name", "runs"):
        problem = "the sweep itself sets this key for each run"
    elif key in before:
        problem = "the key occurs twice"
    elif "" in texts:
        problem = "a value is empty"
    else:
        shown = [value_text(value) for value in Axis(key, tuple(texts)).values]
        twice = [text for number, text in enumerate(shown) if text in shown[:number]]
        problem = f"{twice[0]} occurs twice" if twice else ""
    if problem:
        raise UserError(
            "E-JOB-132",
            f"{key}={','.join(texts)} cannot be swept",
            why=problem,
            fix="write each key once, with different values: optimizer.lr=1e-5,3e-5. A value with commas needs quotes",
        )


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or the complete key if several keys have the same end."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def _run_name(base: str, suffix: str) -> str:
    """Return the name of a run, which is also that of its folder. Long or unusual values are shortened to a hash."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", suffix)
    if safe == suffix and len(safe) <= MAX_NAME:
        return f"{base}-{safe}"
    digest = hashlib.sha256(suffix.encode()).hexdigest()[:8]
    return f"{base}-{safe[: MAX_NAME - 9].rstrip('._-')}-{digest}"
