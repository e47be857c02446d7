"""Verdicts on disk, so that the same question is compiled once. Free of jax: a hit answers at once.

Before lowering only the question is known, so its key is the hash of all that the compiled program depends on: the
job's fields that reach it, the slice, our own source, the versions of the compiler's packages and the flags of the
environment. A verdict carries the hash of the lowered program with it.
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

from forerun.models.plugin import plugin_spec
from forerun.models.pretrained import config_of
from forerun.models.sizes import is_plugin
from forerun.models.teacher import teacher_section
from forerun.plan.compiler import Phase
from forerun.plan.question import Question
from forerun.plan.verdict import Verdict, verdict
from forerun.safe_text import redact, redacted_tree

FORMAT = 1
PACKAGES = ("jax", "jaxlib", "libtpu", "optax")
SOURCE = Path(__file__).resolve().parents[1]
ROOMS = ("nn", "models", "objectives", "methods", "program", "hardware", "plan")
# What only chooses, prices or shows; everything else counts, also what is added later.
BYSTANDERS = {
    "hardware": {"prices", "show"},
    "plan": {"answers", "cache", "calibration", "candidates", "charts", "defaults", "figures", "footprint", "money"}
    | {"order", "page", "progress", "ranking", "refusal", "remedies", "report", "save_interval", "scoreboard"}
    | {"search", "strategy", "winner"},
}
# Of the job, what never reaches the compiled step.
OUTSIDE = {"name", "seed", "device", "devices", "data", "steps", "epochs", "checkpoint", "log_every", "sample", "runs"}
SCHEDULE = ("lr", "warmup", "final_lr", "weight_decay")  # of the optimizer: arguments of the step
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
JAX_SETTINGS_OF_OUR_OWN = ("JAX_PLATFORMS", "JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR")


def folder() -> Path:
    """Where verdicts lie: `forerun/verdicts` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun" / "verdicts"


def key(question: Question) -> str:
    """Equal for questions that lead to the same program: a mesh of -1 and the number it stands for are one."""
    job = question.job.model_dump(mode="json", exclude=OUTSIDE)
    for name in SCHEDULE:
        del job["optimizer"][name]
    derived = question.derived(None)
    job["mesh"], job["micro_batch"] = str(derived.mesh), derived.micro_batch
    if is_plugin(question.job.model):
        job["model_source"] = _plugin_source(str(question.job.model.name))
    else:
        job["model"] = repr(config_of(question.job.model))
    if question.job.objective is not None:
        job["objective_source"] = _plugin_source(question.job.objective.name)
    if question.job.distil is not None:
        job["distil"] |= {"teacher": repr(config_of(teacher_section(question.job))), "revision": None}
        job["distil"]["cache"] = question.job.distil.cache is not None
        job["recording"] = question.recording
    asked = {"format": FORMAT, "job": job, "slice": [question.slice.topology, question.slice.topology_options]}
    asked |= {"source": _own_source(), "versions": _versions(), "flags": _flags()}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def recall(question: Question) -> Verdict | None:
    """The stored verdict, or None. An entry that cannot be read is none."""
    try:
        content = json.loads((folder() / f"{key(question)}.json").read_text("utf-8"))
        known: Verdict = _decoded(Verdict, {**content["verdict"], "question": None})
        return dataclasses.replace(known, question=question)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(answer: Verdict) -> None:
    _write(
        answer.question,
        {"verdict": _encoded(answer, skip="question"), "asked": redacted_tree(json.loads(answer.question.to_json()))},
    )


def _write(question: Question, content: dict[str, Any]) -> None:
    """Whole or not at all. A cache that cannot be written is no reason to lose the answer."""
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


def remember_failure(question: Question, text: str) -> None:
    """That the compiler breaks on it: a search need not find that out twice."""
    _write(question, {"failure": redact(text)})


def recall_failure(question: Question) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder() / f"{key(question)}.json").read_text("utf-8"))["failure"])
    return None


def cached_verdict(
    question: Question, stop: threading.Event | None = None, on_phase: Phase = lambda phase: None
) -> Verdict:
    """As `verdict`, but a question that was answered before is not compiled again."""
    known = recall(question)
    if known is None:
        known = verdict(question, stop, on_phase)
        remember(known)
    return known


def _encoded(value: Any, skip: str = "") -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encoded(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != skip}
    if isinstance(value, Mapping):
        return {str(name): _encoded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(inner) for inner in value]
    return value


def _decoded(kind: Any, value: Any) -> Any:
    """The value as its type hint says; ValueError or TypeError if it is none of that."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _decoded(next(one for one in inner if one is not type(None)), value)
    if kind is Question or kind is Any:
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


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _flags() -> dict[str, str]:
    """Settings of the environment that reach the compiler's process."""
    own = {name for name in os.environ if name.startswith("JAX_")} - set(JAX_SETTINGS_OF_OUR_OWN)
    return {name: os.environ[name] for name in sorted({*own, *FLAGS}) if os.environ.get(name)}


@cache
def _own_source() -> str:
    return _digest(_source_files())


def _source_files() -> Iterator[Path]:
    for room in ROOMS:
        for path in sorted((SOURCE / room).rglob("*")):
            if path.suffix in (".py", ".csv") and path.stem not in BYSTANDERS.get(room, ()):
                yield path
    yield from sorted((SOURCE / "config").glob("*.py"))


def _plugin_source(name: str) -> str:
    """Of a class of the user's own: its package, or the Python files that stand beside it."""
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
