"""The figures of `forerun check` that need jax, and their store on disk.

Counting parameters and optimizer state builds the model's specs, and importing jax takes longer than everything else in
`check`. The figures depend on few keys of a job, so they are computed once and stored. A job with a custom class is
never stored: its code may do anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.models.sizes import is_plugin

if TYPE_CHECKING:
    from forerun.hardware.mesh import MeshShape
    from forerun.resolve.resolved_job import ResolvedJob

FORMAT = 1
PACKAGES = ("jax", "jaxlib", "optax")
SOURCE = Path(__file__).resolve().parents[2]
# Keys of the job, and of its optimizer, that change none of the figures.
OUTSIDE = {"name", "seed", "device", "devices", "data", "steps", "epochs", "checkpoint", "log_every", "sample", "runs"}
SCHEDULE = ("lr", "warmup", "final_lr")


@dataclass(frozen=True)
class OptimizerFigures:
    """The state of the optimizer, and the parameters that it trains."""

    state_bytes: int
    learned: int
    linear: int  # parameters in matrices of linear layers, which Muon trains


@dataclass(frozen=True)
class TargetFigures:
    """A module with adapters: the text of its layers, and the text of its sizes."""

    name: str
    layers: str
    sizes: str


@dataclass(frozen=True)
class JobFigures:
    """What a job's model, method and optimizer amount to on one kind of device."""

    parameters: int
    trainable_parameters: int
    heads: int | None
    vocab: int
    chunk: int
    kernel: str
    obstacle: str | None
    optimizer: OptimizerFigures
    targets: tuple[TargetFigures, ...]


def key(resolved: ResolvedJob, platform: str, device_kind: str, shape: MeshShape) -> str | None:
    """Return the key of a job's figures, or None if they must not be stored."""
    job = resolved.job
    teacher = resolved.teacher
    sections = [job.model] if teacher is None else [job.model, teacher.section]
    if any(map(is_plugin, sections)) or job.objective is not None or job.optimizer.is_custom:
        return None
    asked = job.model_dump(mode="json", exclude=OUTSIDE)
    for name in SCHEDULE:
        del asked["optimizer"][name]
    configs = [repr(resolved.config), None if teacher is None else repr(teacher.config)]
    versions = [metadata.version(name) for name in PACKAGES]
    content = [FORMAT, asked, configs, platform, device_kind, str(shape), versions, list(_source_state())]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _source_state() -> Iterator[tuple[str, int, int]]:
    """Yield the name, the size and the time of each source file of forerun."""
    for folder, subfolders, names in os.walk(SOURCE):
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        for name in sorted(names):
            if name.endswith((".py", ".csv")):
                state = os.stat(os.path.join(folder, name))
                yield name, state.st_size, state.st_mtime_ns


def folder() -> Path:
    """Return the folder of stored figures, in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun" / "figures"


def load_figures(name: str | None) -> JobFigures | None:
    """Return the stored figures with this key, or None if there are none that can be read."""
    if name is None:
        return None
    try:
        raw = json.loads((folder() / f"{name}.json").read_text("utf-8"))
        optimizer = OptimizerFigures(**raw.pop("optimizer"))
        targets = tuple(TargetFigures(**target) for target in raw.pop("targets"))
        return JobFigures(**raw, optimizer=optimizer, targets=targets)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def store_figures(name: str | None, figures: JobFigures) -> None:
    """Store figures atomically. Ignore errors of the disk: the figures are then computed again."""
    if name is None:
        return
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=folder(), suffix=".draft")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(figures), file)
            os.replace(draft, folder() / f"{name}.json")
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
