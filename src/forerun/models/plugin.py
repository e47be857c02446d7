"""Plug-ins: classes that a job file names as `module.path:Class`. Functions to find, import, create and check them.

The job's folder is never on `sys.path`, where any library could find code in it. A finder searches the folder only
while the module of a plug-in is imported, and only in the thread that imports it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from forerun.errors import UserError


@dataclass(frozen=True)
class Plugin:
    """A kind of plug-in, with the texts for its error messages."""

    kind: str  # model, objective
    options: str  # the job's key for the arguments of the class
    added: str  # a phrase that names the arguments that forerun adds
    needs: tuple[str, ...]  # names of the required members
    protocol: str  # the class that documents the required members


# Packages that jax imports when it opens a backend, which a plug-in may cause while it is imported: all modules of the
# namespace `jax_plugins`, and the libraries of CUDA and of TPUs. They never come from the job's folder.
_PACKAGES_OF_BACKENDS = ("jax_plugins", "nvidia", "libtpu")

_job_folder: Path | None = None
_found_there: set[str] = set()  # top-level modules that a finder found in a job's folder


def use_job_folder(folder: Path | None) -> None:
    """Make plug-ins importable from `folder`, after all installed packages. None means installed packages only."""
    global _job_folder
    _job_folder = None if folder is None else folder.resolve()


def job_folder() -> Path | None:
    """Return the folder that `use_job_folder` set. A child process that imports plug-ins needs it too."""
    return _job_folder


def plugin_files() -> dict[str, Path]:
    """Return the source files of all modules that were imported from the job's folder, by their path in it."""
    if _job_folder is None:
        return {}
    files = [Path(file) for name in _found_there for file in _sources(name)]
    return {str(file.relative_to(_job_folder)): file for file in sorted(files) if file.is_relative_to(_job_folder)}


def _sources(package: str) -> list[str]:
    """Return the files of an imported top-level module and of its submodules."""
    inside = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]
    return [file for module in inside if (file := getattr(module, "__file__", None)) is not None]


def import_plugin(module: str) -> ModuleType:
    """Import the module of a plug-in, which may import other modules of the job's folder in turn."""
    if _job_folder is None:
        return importlib.import_module(module)
    # jax imports optional packages when it is imported (nvidia, libtpu). None of them may come from the job's folder.
    importlib.import_module("jax")
    finder = _JobFolderFinder(_job_folder)
    sys.meta_path.append(finder)
    try:
        return importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)


def plugin_spec(package: str) -> ModuleSpec | None:
    """Return where `import_plugin` finds a top-level module, without importing it."""
    found = find_spec(package)
    if found is None and _job_folder is not None:
        found = _JobFolderFinder(_job_folder).find_spec(package)
    return found


class _JobFolderFinder:
    """Finds top-level modules in one folder, for the thread that created the finder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._thread = str(folder), threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or threading.get_ident() != self._thread:
            return None
        if fullname in _PACKAGES_OF_BACKENDS:
            return None
        found = PathFinder.find_spec(fullname, [self._folder])
        if found is not None:
            _found_there.add(fullname)
        return found


def create_plugin(name: str, arguments: dict[str, Any], plugin: Plugin) -> Any:
    """Import the class `module.path:Class` and return an instance with all required members.

    Args:
        name: The class as `module.path:Class`.
        arguments: Keyword arguments of the class.
        plugin: The kind of plug-in, for the required members and for error messages.

    Raises:
        UserError: The module or class does not exist, rejects the arguments, or lacks a member.
    """
    module_name, _, class_name = name.partition(":")
    try:
        made = getattr(import_plugin(module_name), class_name)(**arguments)
    except ModuleNotFoundError as error:
        raise UserError(
            "E-MODEL-007",
            f"{plugin.kind} {name!r}: module {error.name!r} was not found",
            why="forerun searches the folder of the job file and the installed packages",
            fix=f"put {module_name}.py beside the job file, or install its package",
        ) from error
    except AttributeError as error:
        raise UserError(
            "E-MODEL-008",
            f"{plugin.kind} {name!r}: {error}",
            why="the name after the colon must be a class of that module",
            fix="correct the name",
        ) from error
    except TypeError as error:
        raise UserError(
            "E-MODEL-009",
            f"{plugin.kind} {name!r} does not accept these options",
            why=str(error),
            fix=f"set {plugin.options} to the arguments of the class; {plugin.added}",
        ) from error
    lacks = [part for part in plugin.needs if not hasattr(made, part)]
    if lacks:
        raise UserError(
            "E-MODEL-010",
            f"{plugin.kind} {name!r} lacks {', '.join(lacks)}",
            why=f"{plugin.protocol} lists the required members",
            fix="add them; docs/how-to/own.md has an example",
        )
    return made
