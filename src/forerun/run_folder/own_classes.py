"""The user's own classes and functions of a job, with the source that this process executed."""

from __future__ import annotations

import hashlib
import inspect
import linecache
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from forerun.config.schema import Job
from forerun.models.plugin import MAIN, executed_source, job_folder, own_modules

CHANGED_FILE = "the file may have changed since this process imported it"
NO_SOURCE = "Python has no source of a class that was typed into an interactive session"


@dataclass(frozen=True)
class OwnCode:
    """The code of a job.

    Attributes:
      folder: the folder that contains the modules, or None if no class is in a module of the user.
      classes: what is known about each class, by its key in the job.
      files: the source of each file by its path in `folder`, or by its absolute path if it is elsewhere. None if the
        executed source is unknown.
    """

    folder: Path | None
    classes: dict[str, dict[str, str | None]]
    files: dict[str, bytes | None]


def class_names(job: Job) -> dict[str, str]:
    """Return the classes `module.path:Class` that a job names, by their keys."""
    named = {"model.name": job.model.name, "optimizer.name": job.optimizer.name}
    named |= {"objective.name": None if job.objective is None else job.objective.name}
    named |= {f"track.to[{n}]": name for n, name in enumerate(job.track.to)}
    return {key: name for key, name in named.items() if name is not None and ":" in name}


def own_code(names: dict[str, str]) -> OwnCode:
    """Return the code of the classes of a job, which must have been imported. `names` has them by their keys."""
    modules = own_modules(name.partition(":")[0] for name in names.values())
    folder = code_folder(names.values())
    files = {_name_in(folder, Path(str(module.__file__))): executed_source(module) for module in modules.values()}
    return OwnCode(folder, {key: _described(name, folder) for key, name in names.items()}, dict(sorted(files.items())))


def code_folder(names: Any) -> Path | None:
    """Return the folder from which the first of these classes in a module of the user was imported, or None."""
    for name in names:
        package = name.partition(":")[0].partition(".")[0]
        module = sys.modules.get(package)
        inside = own_modules([name.partition(":")[0]])
        if package == MAIN or module is None or not inside:
            continue
        places = [Path(str(place)) for place in getattr(module, "__path__", ())] or [Path(str(module.__file__))]
        job = job_folder()
        return job if job is not None and places[0].resolve().is_relative_to(job) else places[0].resolve().parent
    return None


def digest(source: bytes | None) -> str | None:
    """Return the SHA-256 of a source, or None for an unknown one."""
    return None if source is None else hashlib.sha256(source).hexdigest()


def _name_in(folder: Path | None, file: Path) -> str:
    file = file.resolve()
    return str(file.relative_to(folder)) if folder is not None and file.is_relative_to(folder) else str(file)


def _described(name: str, folder: Path | None) -> dict[str, str | None]:
    """Return the name of a class and where its source is: a recorded file, a package, or the source itself."""
    module_name, _, class_name = name.partition(":")
    module = sys.modules[module_name]
    if module_name in own_modules([module_name]):
        file = _name_in(folder, Path(str(module.__file__)))
        recorded: dict[str, str | None] = {"class": name, "file": file}
        return recorded if executed_source(module) is not None else recorded | {"reason": CHANGED_FILE}
    if module_name != MAIN:
        package = module_name.partition(".")[0]
        installed = metadata.packages_distributions().get(package, [])
        return {"class": name, "package": ", ".join(f"{one} {metadata.version(one)}" for one in installed) or package}
    source = _typed_source(getattr(module, class_name))
    if not source:
        return {"class": name, "source": None, "reason": NO_SOURCE}
    return {"class": name, "sha256": digest(source.encode()), "source": source}


def _typed_source(made: Any) -> str:
    """Return the cells of a notebook that define a class or a function, or "" if Python does not have them.

    Python finds the source of a notebook's class only through its functions: their code names the cell.
    """
    bases = [one for one in getattr(made, "__mro__", [made]) if one.__module__ == MAIN]
    members = [made, *(member for base in bases for member in vars(base).values())]
    cells: dict[str, str] = {}
    for member in members:
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        if inspect.isfunction(function) and (lines := linecache.getlines(function.__code__.co_filename)):
            cells[function.__code__.co_filename] = "".join(lines)
    return "\n".join(cells.values())


def source_text(source: bytes) -> str:
    """Return a Python source as text. It may declare another encoding than UTF-8."""
    return decode_source(source)
