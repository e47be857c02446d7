"""A disk cache of fit results, so that the same request is compiled only once.

This module does not import jax, so a cache hit is fast.

The key must be known before lowering. So it is a hash of everything that the compiled program depends on: the job's
fields that reach it, the slice, forerun's source, the versions of the compiler's packages and flags of the environment.
A stored result also has the hash of the lowered program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import threading
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from forerun.hardware.chips import target_description
from forerun.hardware.slices import Slice
from forerun.models.plugin import plugin_spec
from forerun.planner.compile.compiler import OnPhase, verdict
from forerun.planner.compile.fit_result import FitResult, decided, is_open
from forerun.planner.compile.installed_compilers import PLUGINS
from forerun.planner.compile.request import CompileRequest
from forerun.planner.compile.result_folder import folder as folder
from forerun.safe_text import redact, redacted_tree

FORMAT = 1
PACKAGES = {
    "tpu": ("jax", "jaxlib", "libtpu", "optax"),
    "gpu": ("jax", "jaxlib", "optax", *(name for pair in PLUGINS for name in pair)),
}
SOURCE = Path(__file__).resolve().parents[2]
PACKAGE_NAMES = ("nn", "models", "objectives", "methods", "program", "resolve", "hardware", "planner")
# Modules that do not affect a result. All others count for the key, including those that are added later.
UNCOUNTED = {
    "hardware/prices.py",
    "hardware/tables/gpu_prices.csv",
    "hardware/tables/machines.csv",
    "hardware/tables/prices.csv",
    "hardware/show.py",
    "planner/compile/pool.py",
    "planner/compile/result_cache.py",
    "planner/compile/result_folder.py",
    "planner/trace.py",
}
UNCOUNTED_PACKAGES = ("planner/cost/", "planner/report/", "planner/search/")
# Fields of the job that do not affect the compiled step.
OUTSIDE = {"name", "seed", "device", "devices", "data", "steps", "epochs", "checkpoint", "log_every", "sample", "runs"}
# Fields of the optimizer that are arguments of the step.
SCHEDULE = ("lr", "warmup", "final_lr", "decay", "power", "cycles", "weight_decay")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
JAX_SETTINGS_OF_OUR_OWN = ("JAX_PLATFORMS", "JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR")


def key(question: CompileRequest) -> str:
    """Return the key of a request. Requests that lead to the same program have the same key.

    For example, a mesh size of -1 and the number that it resolves to have the same key.
    """
    job = question.job.model_dump(mode="json", exclude=OUTSIDE)
    for name in SCHEDULE:
        del job["optimizer"][name]
    for group in job["optimizer"]["groups"]:
        group |= {"lr_scale": None, "weight_decay": group["weight_decay"] is not None}
    if question.job.optimizer.is_custom:
        job["optimizer_source"] = _plugin_source(question.job.optimizer.name)
    derived = question.derived()
    several = f" {question.job.mesh.dcn_dtype}" if derived.mesh.slices > 1 else ""
    job["mesh"], job["micro_batch"] = f"{derived.mesh}{several}", derived.micro_batch
    if question.resolved.config is None:
        job["model_source"] = _plugin_source(str(question.job.model.name))
    else:
        job["model"] = repr(question.resolved.config)
    if question.job.objective is not None:
        job["objective_source"] = _plugin_source(question.job.objective.name)
    method = question.job.method
    if method.teacher is not None and question.resolved.teacher is not None:
        job["distil"] |= {"teacher": repr(question.resolved.teacher.config), "revision": None}
        job["distil"]["cache"] = not method.runs_teacher
        job["recording"] = question.recording
    asked = {"format": FORMAT, "job": job, "slice": _target(question.slice)}
    asked |= {"source": _own_source(), "versions": _versions(question.slice.platform), "flags": _flags()}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def recall(question: CompileRequest) -> FitResult | None:
    """Return the stored result, or None if no readable one exists."""
    try:
        content = json.loads((folder() / f"{key(question)}.json").read_text("utf-8"))
        known: FitResult = _decoded(FitResult, {**content["verdict"], "question": None})
        return dataclasses.replace(known, question=question)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(answer: FitResult) -> None:
    """Store a result."""
    _write(
        answer.question,
        {
            "verdict": _encoded(answer, skip=("question", "module")),
            "asked": redacted_tree(json.loads(answer.question.to_json())),
        },
    )


def _write(question: CompileRequest, content: dict[str, Any]) -> None:
    """Write an entry atomically. Ignore errors of the disk: the result is still valid without a cache."""
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=folder(), suffix=".draft")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(draft, folder() / f"{key(question)}.json")
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise


def store_failure(question: CompileRequest, text: str) -> None:
    """Store that the compiler fails on a request, so that a search does not try it again."""
    _write(question, {"failure": redact(text)})


def load_failure(question: CompileRequest) -> str | None:
    """Return the text of a stored failure, or None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder() / f"{key(question)}.json").read_text("utf-8"))["failure"])
    return None


def cached_fit_result(
    question: CompileRequest,
    stop: threading.Event | None = None,
    on_phase: OnPhase = lambda phase: None,
) -> FitResult:
    """Return the stored result of a request, or compile it like `verdict` and store the result."""
    known = recall(question)
    if known is None:
        if is_open(question):  # store both programs too, so that a job with a fixed value finds them
            known = decided(question, lambda fixed: cached_fit_result(fixed, stop, on_phase))
        else:
            known = verdict(question, stop, on_phase)
        remember(known)
    return known


def _encoded(value: Any, skip: Sequence[str] = ()) -> Any:
    """Return a value as JSON types: dataclasses become objects, without the fields `skip`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encoded(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in skip}
    if isinstance(value, Mapping):
        return {str(name): _encoded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(inner) for inner in value]
    return value


def _decoded(kind: Any, value: Any) -> Any:
    """Return a JSON value as an instance of its type hint; raise ValueError or TypeError if it does not match."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _decoded(next(one for one in inner if one is not type(None)), value)
    if kind is CompileRequest or kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is no {kind.__name__}")
        hints = typing.get_type_hints(kind)
        return kind(**{name: _decoded(hints[name], one) for name, one in value.items()})
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_decoded(inner[0], name): _decoded(inner[1], one) for name, one in value.items()}
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(_decoded(inner[0], one) for one in value)
    if origin is tuple:
        return tuple(_decoded(hint, one) for hint, one in zip(inner, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [_decoded(inner[0], one) for one in value]
    if kind is bool and not isinstance(value, bool):
        raise TypeError(f"{value!r} is no bool")
    return kind(value)


def _target(one: Slice) -> list[Any]:
    """Return what the compiler and the decision depend on. The topologies of all GPUs look the same."""
    if one.chip.gpu is None:
        return [one.topology, one.topology_options]
    description = target_description(one.chip.gpu, one.chip.hbm_bytes_per_second or 0)
    return [one.topology, one.chip.name, description, one.chip.usable_bytes]


@cache
def _versions(platform: str) -> dict[str, str]:
    found = {}
    for name in PACKAGES[platform]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _flags() -> dict[str, str]:
    """Return the environment variables that affect the compiler's process."""
    own = {name for name in os.environ if name.startswith("JAX_")} - set(JAX_SETTINGS_OF_OUR_OWN)
    return {name: os.environ[name] for name in sorted({*own, *FLAGS}) if os.environ.get(name)}


@cache
def _own_source() -> str:
    return _digest(_source_files())


def _source_files() -> Iterator[Path]:
    for package in PACKAGE_NAMES:
        for path in sorted((SOURCE / package).rglob("*")):
            name = path.relative_to(SOURCE).as_posix()
            if path.suffix in (".py", ".csv") and name not in UNCOUNTED and not name.startswith(UNCOUNTED_PACKAGES):
                yield path
    yield from sorted((SOURCE / "config").glob("*.py"))


def _plugin_source(name: str) -> str:
    """Return a digest of the source of a user's class: its package, or all Python files of its folder."""
    top = name.partition(":")[0].partition(".")[0]
    found = plugin_spec(top)
    if found is None or not found.origin:
        return ""
    home = Path(found.origin).parent
    return _digest(sorted(home.rglob("*.py") if found.submodule_search_locations else home.glob("*.py")))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
