"""Plug-ins: classes that a job file names as `module.path:Class`. Functions to find, import, create and check them.

The job's folder is never on `sys.path`, where any library could find code in it. A finder searches the folder only
while the module of a plug-in is imported, and only in the thread that imports it (`forerun.models.own_code`).
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from forerun.errors import UserError
from forerun.models.own_code import (
    MAIN,
    OwnCodeFinder,
    forget,
    forget_changed,
    note_reloaded,
    own_modules,
    spec_in_folder,
    uncertain,
)


@dataclass(frozen=True)
class Plugin:
    """A kind of plug-in, with the texts for its error messages."""

    kind: str  # model, objective
    options: str  # the job's key for the arguments of the class
    added: str  # a phrase that names the arguments that forerun adds
    needs: tuple[str, ...]  # names of the required members
    protocol: str  # the class that documents the required members


_job_folder: Path | None = None
_current: set[str] = set()  # plug-in modules that were compared with their files since `use_job_folder`


def use_job_folder(folder: Path | None) -> None:
    """Make plug-ins importable from `folder`, after all installed packages. None means installed packages only.

    Each command and each function of the API calls this once, before it imports a plug-in. Own modules whose files
    changed since the last call are then imported again, so all plug-ins of one run have the same version.
    """
    global _job_folder
    _job_folder = None if folder is None else folder.resolve()
    _current.clear()
    forget_changed(_job_folder)


def job_folder() -> Path | None:
    """Return the folder that `use_job_folder` set. A child process that imports plug-ins needs it too."""
    return _job_folder


def import_plugin(module: str) -> ModuleType:
    """Import the module of a plug-in, which may import other modules of the job's folder in turn."""
    if module == MAIN:
        return sys.modules[MAIN]
    if _job_folder is not None:
        # jax imports optional packages when it is imported (nvidia, libtpu). None may come from the job's folder.
        importlib.import_module("jax")
    finder = OwnCodeFinder(_job_folder, module)
    sys.meta_path.insert(0, finder)
    try:
        imported = importlib.import_module(module)
        modules = {} if module in _current else own_modules([module])
        if names := uncertain(modules):
            note_reloaded(modules[name] for name in names)
            forget(modules)
            imported = importlib.import_module(module)
        _current.add(module)
        return imported
    finally:
        sys.meta_path.remove(finder)


def plugin_spec(package: str) -> ModuleSpec | None:
    """Return where `import_plugin` finds a top-level module, without importing it. None for the notebook or script."""
    if package == MAIN:
        return None
    found = find_spec(package)
    if found is None and _job_folder is not None:
        found = spec_in_folder(package, _job_folder)
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
