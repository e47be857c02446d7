"""The local files of a job that travel to the rented machines: data, tokenizer, model folder and own Python modules.

`file_rules` has the rules for what is skipped or refused.
"""

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

from forerun.cloud.one_line import require_one_line
from forerun.cloud.setup.file_rules import (
    FileRules,
    FolderEntry,
    folder_entries,
    folder_entry,
    link_error,
    no_files_error,
)
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
    """A file that travels.

    Attributes:
      name: its path in the folder of the job on the host, with slashes.
      source: the real path on this machine.
    """

    name: str
    source: Path


@dataclass(frozen=True)
class SkippedFile:
    """A file or folder that does not travel. `name` is the path that it would have in the folder of the job."""

    name: str
    reason: str


@dataclass(frozen=True)
class JobFiles:
    """The files of a job.

    Attributes:
      overrides: the keys of the job whose paths change, such as `data.path=/var/lib/forerun/job/text`.
      skipped: files and folders beside those that travel, which the rules exclude.
    """

    files: tuple[JobFile, ...]
    overrides: tuple[str, ...]
    skipped: tuple[SkippedFile, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.source.stat().st_size for file in self.files)


def job_files(text: str, folder: Path, arguments: Sequence[str], target: str) -> JobFiles:
    """Return the local files that a job needs, and the overrides that make the job find them in `target`.

    Args:
      text: the job file.
      folder: what paths in the job file are relative to.
      arguments: overrides of the job. Their paths are relative to the current folder.
      target: the folder of the job on the host.

    Raises:
      UserError: an argument has a control character, the files are too large, a stage of the job names a file outside
        of the folder, or the rules exclude a file that the job needs.
    """
    require_one_line({"an argument of the job": tuple(arguments)})
    folder = Path(os.path.abspath(folder))
    with tempfile.TemporaryDirectory(prefix="forerun-job-") as name:
        file = Path(name) / JOB_FILE
        file.write_text(text, encoding="utf-8")
        unmerged = read_unmerged(file)
        stages = unmerged.tree.get("stages")
        if isinstance(stages, dict):
            unmerged = Given(unmerged.tree, unmerged.lines, folder / JOB_FILE)
            trees = [with_section(unmerged, ("stages", stage), ()).tree for stage in stages]
            paths = [path for tree in trees for path in _local_paths(tree, folder)]
            _require_inside(paths)
            overrides = []
        else:
            tree = read(file, arguments, folder).tree
            trees = [tree]
            paths = list(_local_paths(tree, folder))
            overrides = [f"{path.key}={_yaml(f'{target}/{path.name}')}" for path in paths]
    entries = [entry for path in paths for entry in path.entries(folder)]
    entries += [entry for tree in trees for entry in _modules(tree, folder)]
    sources = {entry.path.as_posix(): entry.source for entry in entries if entry.source is not None}
    skipped = {entry.path.as_posix(): entry.reason for entry in entries if entry.source is None}
    sources.pop(JOB_FILE, None)
    files = tuple(JobFile(name, sources[name]) for name in sorted(sources))
    _require_size(files)
    unsent = tuple(SkippedFile(name, skipped[name]) for name in sorted(skipped) if name not in sources)
    return JobFiles(files, tuple(overrides), unsent)


@dataclass(frozen=True)
class _LocalPath:
    """A path of the job: its key, the local path, and where it is in the job's folder on the host."""

    key: str
    path: str
    name: str
    inside: bool

    def entries(self, job_folder: Path) -> list[FolderEntry]:
        """Return the files that travel and the entries that are skipped, with their paths in the job's folder.

        Raises:
          UserError: the rules exclude the path itself or all files below it, or a link leaves the folder.
        """
        root = Path(_fixed_part(self.path))
        base = Path(self.name) if str(root) == self.path else _up(Path(self.name), self.path, str(root))
        rules = FileRules(job_folder if self.inside else root if root.is_dir() else root.parent)
        rules.require_named(self.key, root, inside=self.inside)
        if root.is_file():
            return [FolderEntry(base, Path(os.path.realpath(root)))]
        if str(root) == self.path:
            entries = list(folder_entries(root, rules))
        else:
            entries = list(_matches(self.path, root, rules))
        if not any(entry.source for entry in entries):
            reasons = ", ".join(f"{entry.path} ({entry.reason})" for entry in entries[:5])
            raise no_files_error(
                self.key, Path(self.path), f"the rules skip {reasons}" if entries else "it has no file"
            )
        return [FolderEntry(base / entry.path, entry.source, entry.reason) for entry in entries]


def _matches(pattern: str, root: Path, rules: FileRules) -> Iterator[FolderEntry]:
    """Yield the files that match a pattern. Like the reading of data on this machine, this ignores folders."""
    for match in sorted(glob.glob(pattern, recursive=True)):
        path = Path(match)
        real, real_root = Path(os.path.realpath(path)), os.path.realpath(root)
        if path != root and not real.is_relative_to(real_root) and not rules.reason_below(path, root):
            raise link_error(path, root, real)
        if real.is_dir():
            continue
        reason = rules.reason_below(path.parent, root)
        entry = FolderEntry(path.relative_to(root), None, reason) if reason else folder_entry(path, root, rules)
        assert entry is not None  # it is not a folder
        yield entry


def _local_paths(tree: dict[str, Any], folder: Path) -> Iterator[_LocalPath]:
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
        yield _LocalPath(".".join(map(str, path)), value, name, inside)


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


def _modules(tree: dict[str, Any], folder: Path) -> Iterator[FolderEntry]:
    """Yield the Python files of the job's folder if the job names a class in one of them."""
    names = {plugin[1] for text in _texts(tree) if (plugin := _PLUGIN.fullmatch(text))}
    if any((folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file() for name in names):
        yield from _python_files(folder, FileRules(folder))


def _python_files(folder: Path, rules: FileRules) -> Iterator[FolderEntry]:
    for parent, folders, names in os.walk(folder):
        paths = [Path(parent, name) for name in sorted(folders) if name != "runs"]
        paths = [path for path in paths if not rules.reason(path, is_folder=True)]
        folders[:] = [path.name for path in paths if not path.is_symlink()]
        # Only a linked folder with Python modules can matter to the imports of the job.
        paths = [path for path in paths if path.is_symlink() and (path / "__init__.py").is_file()]
        paths += [Path(parent, name) for name in sorted(names) if name.endswith(".py")]
        yield from (entry for path in paths if (entry := folder_entry(path, folder, rules)) is not None)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)


def _yaml(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _require_inside(paths: Sequence[_LocalPath]) -> None:
    for path in paths:
        if not path.inside:
            raise UserError(
                "E-CLOUD-032",
                f"{path.key} of a stage names a file outside of the job's folder",
                why=f"{path.path} has another path on a rented machine, and the job has several stages",
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
