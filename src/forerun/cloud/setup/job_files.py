"""The local files of a job that travel to the rented machines: data, tokenizer, model folder and own Python modules."""

from __future__ import annotations

import glob
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config.merge import Given, path_keys, read, read_unmerged, with_section
from forerun.errors import UserError
from forerun.units import MIB

JOB_FILE = "job.yaml"
MOST_BYTES = 512 * MIB  # each host gets a copy through the connection of the controller
_RESULTS = (("data", "store"), ("distil", "cache"))  # folders that a run writes
_PLUGIN = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*")
_PLAIN = re.compile(r"[\w./+-]+")


@dataclass(frozen=True)
class JobFile:
    """A file that travels. `name` is its path in the folder of the job, with slashes."""

    name: str
    source: Path


@dataclass(frozen=True)
class JobFiles:
    """The files of a job.

    Attributes:
      overrides: the keys of the job whose paths change, such as `data.path=/var/lib/forerun/job/text`.
    """

    files: tuple[JobFile, ...]
    overrides: tuple[str, ...]


def job_files(text: str, folder: Path, arguments: Sequence[str], target: str) -> JobFiles:
    """Return the local files that a job needs, and the overrides that make the job find them in `target`.

    Args:
      text: the job file.
      folder: what paths in the job file are relative to.
      arguments: overrides of the job. Their paths are relative to the current folder.
      target: the folder of the job on the host.

    Raises:
      UserError: the files are too large, or a stage of the job names a file outside of the folder.
    """
    folder = Path(os.path.abspath(folder))
    with tempfile.TemporaryDirectory(prefix="forerun-job-") as name:
        file = Path(name) / JOB_FILE
        file.write_text(text, encoding="utf-8")
        unmerged = read_unmerged(file)
        stages = unmerged.tree.get("stages")
        if isinstance(stages, dict):
            unmerged = Given(unmerged.tree, unmerged.lines, folder / JOB_FILE)
            trees = [with_section(unmerged, ("stages", stage), ()).tree for stage in stages]
            found = [place for tree in trees for place in _places(tree, folder)]
            _require_inside(found)
            overrides = []
        else:
            tree = read(file, arguments, folder).tree
            trees = [tree]
            found = list(_places(tree, folder))
            overrides = [f"{place.key}={_yaml(f'{target}/{place.name}')}" for place in found]
    files = {one.name: one for place in found for one in place.files()}
    for tree in trees:
        files |= {one.name: one for one in _modules(tree, folder)}
    files.pop(JOB_FILE, None)
    _require_size(list(files.values()))
    return JobFiles(tuple(files[name] for name in sorted(files)), tuple(overrides))


@dataclass(frozen=True)
class _Place:
    """A path of the job: its key, the local path, and where it is in the job's folder on the host."""

    key: str
    path: str
    name: str
    inside: bool

    def files(self) -> Iterator[JobFile]:
        fixed = _fixed_part(self.path)
        base = Path(self.name) if fixed == self.path else _up(Path(self.name), self.path, fixed)
        matches = [fixed] if fixed == self.path else sorted(glob.glob(self.path, recursive=True))
        for match in matches:
            inside = os.path.relpath(match, fixed)
            name = base if inside == "." else base / inside
            for file in _below(Path(match)):
                relative = file.relative_to(match)
                yield JobFile((name / relative if relative.parts else name).as_posix(), file)


def _places(tree: dict[str, Any], folder: Path) -> Iterator[_Place]:
    number = 0
    for path in path_keys(tree):
        value: Any = tree
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if not isinstance(value, str) or path in _RESULTS or not os.path.isabs(value):
            continue
        if not (os.path.exists(value) or glob.glob(value, recursive=True)):
            continue  # it was not found here either: the job reports it
        inside = Path(value).is_relative_to(folder)
        fixed = _fixed_part(value)
        if inside:
            name = Path(value).relative_to(folder).as_posix()
        else:
            rest = os.path.relpath(value, fixed)
            name = f"files/{number}/{Path(fixed).name}" + ("" if rest == "." else f"/{rest}")
            number += 1
        yield _Place(".".join(map(str, path)), value, name, inside)


def _fixed_part(path: str) -> str:
    """Return the folder before the first pattern, or the path if it exists or has no pattern."""
    if os.path.exists(path) or not glob.has_magic(path):
        return path
    parts = Path(path).parts
    first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return str(Path(*parts[:first]))


def _up(name: Path, path: str, fixed: str) -> Path:
    """Return the part of `name` that belongs to `fixed`: `name` ends with the same pattern as `path`."""
    depth = len(Path(path).parts) - len(Path(fixed).parts)
    return Path(*name.parts[:-depth])


def _below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    # Caches and versions of files are not part of the data.
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part in ("__pycache__", ".git") for part in file.relative_to(path).parts)
    )


def _modules(tree: dict[str, Any], folder: Path) -> Iterator[JobFile]:
    """Yield the Python files of the job's folder if the job names a class in one of them."""
    names = {found[1] for text in _texts(tree) if (found := _PLUGIN.fullmatch(text))}
    if any((folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file() for name in names):
        for file in sorted(folder.rglob("*.py")):
            inside = file.relative_to(folder)
            if not any(part.startswith(".") or part in ("__pycache__", "runs") for part in inside.parts):
                yield JobFile(inside.as_posix(), file)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)


def _yaml(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _require_inside(places: Sequence[_Place]) -> None:
    for place in places:
        if not place.inside:
            raise UserError(
                "E-CLOUD-032",
                f"{place.key} of a stage names a file outside of the job's folder",
                why=f"{place.path} has another path on a rented machine, and the job has several stages",
                fix="move it into the folder of the job, and name it relative to that folder, or put it in a bucket",
            )


def _require_size(files: Sequence[JobFile]) -> None:
    sizes = sorted(((file.source.stat().st_size, file.name) for file in files), reverse=True)
    total = sum(size for size, _ in sizes)
    if total > MOST_BYTES:
        raise UserError(
            "E-CLOUD-033",
            f"the local files of the job have {total / MIB:,.0f} MiB, and at most {MOST_BYTES // MIB} MiB can travel",
            why="this machine sends a copy to each host; the largest files: "
            + ", ".join(f"{name} ({size / MIB:,.0f} MiB)" for size, name in sizes[:3]),
            fix="copy them to the bucket with `gcloud storage cp -r DATA gs://BUCKET/DATA`, and name that address",
        )
