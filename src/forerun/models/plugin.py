"""Plug-ins: classes that a job file names as `module.path:Class`. Functions to find, import, create and check them.

The job's folder is never on `sys.path`, where any library could find code in it. A finder searches the folder only
while the module of a plug-in is imported, and only in the thread that imports it.

The user's own code are the modules of plug-ins and the modules that they import, except installed packages. Python
keeps a module until the process ends, so a second run in a notebook would train the old version of an edited file.
`forget_changed` therefore removes modules whose source changed, and the next import executes them again. The loader
keeps the source that it executed, which a run records.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

from forerun.errors import UserError

MAIN = "__main__"  # the notebook or the script, which cannot be imported again
# Packages that jax imports when it opens a backend, which a plug-in may cause while it is imported: all modules of the
# namespace `jax_plugins`, and the libraries of CUDA and of TPUs. They never come from the job's folder.
_PACKAGES_OF_BACKENDS = ("jax_plugins", "nvidia", "libtpu")
_FORERUN = str(Path(__file__).resolve().parents[1]) + os.sep

_folder_of_package: dict[str, Path] = {}  # top-level modules that were found in a job's folder
_reloaded: set[str] = set()  # files of modules that were executed again since `take_reloaded`


class OwnCodeLoader(SourceFileLoader):
    """Executes the source of a module and keeps it.

    It ignores bytecode files. Python compares them with the source by size and by time in seconds, so it could execute
    the old version after a quick edit.
    """

    def __init__(self, name: str, path: str, plugin: str) -> None:
        super().__init__(name, path)
        self.plugin = plugin  # the module whose import caused this one
        self.source = b""

    def get_code(self, fullname: str) -> CodeType:
        self.source = self.get_data(self.path)
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


class OwnCodeFinder:
    """Finds modules as Python does, then top-level modules in the job's folder, for the thread that created it."""

    def __init__(self, folder: Path | None, plugin: str) -> None:
        self._folder, self._plugin, self._thread = folder, plugin, threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if threading.get_ident() != self._thread:
            return None
        spec = _installed_spec(fullname, path, target)
        if spec is None and path is None and self._folder is not None:
            spec = spec_in_folder(fullname, self._folder)
            if spec is not None:
                _folder_of_package[fullname] = self._folder
        if spec is not None and type(spec.loader) is SourceFileLoader and is_own_file(spec.origin):
            spec.loader = OwnCodeLoader(fullname, str(spec.origin), self._plugin)
        return spec


def _installed_spec(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Return the module that the other finders find."""
    for finder in sys.meta_path:
        find = None if isinstance(finder, OwnCodeFinder) else getattr(finder, "find_spec", None)
        if find is not None and (spec := find(name, path, target)) is not None:
            return cast(ModuleSpec, spec)
    return None


def spec_in_folder(package: str, folder: Path) -> ModuleSpec | None:
    """Return a top-level module in a job's folder, or None."""
    return None if package in _PACKAGES_OF_BACKENDS else PathFinder.find_spec(package, [str(folder)])


def is_own_file(file: str | None) -> bool:
    """Return whether a file is source code that is neither installed nor part of Python or forerun."""
    if file is None or not file.endswith(".py") or file.startswith(_FORERUN):
        return False
    standard = sysconfig.get_path("stdlib") + os.sep
    return not file.startswith(standard) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def own_modules(plugins: Iterable[str]) -> dict[str, ModuleType]:
    """Return the imported modules of the user's own code that these modules consist of, by their names."""
    plugins = set(plugins)
    names = [*plugins, *(name for name, loader in _recorded().items() if loader.plugin in plugins)]
    modules: dict[str, ModuleType] = {}
    while names:
        steps = names.pop().split(".")
        for name in (".".join(steps[: n + 1]) for n in range(len(steps))):
            module = sys.modules.get(name)
            if name in modules or module is None or not is_own_file(getattr(module, "__file__", None)):
                continue
            modules[name] = module
            names += _imports(module)
    return modules


def executed_source(module: ModuleType) -> bytes | None:
    """Return the source that this process executed, or None if its file may have changed since then."""
    loader = _loader(module)
    if isinstance(loader, OwnCodeLoader):
        return loader.source
    with suppress(OSError):
        file = Path(str(module.__file__))
        # The inode's time changes with every edit and cannot be set, unlike the time of the content.
        if file.stat().st_ctime < _process_start_seconds():
            return file.read_bytes()
    return None


def uncertain(modules: dict[str, ModuleType]) -> list[str]:
    """Return the modules that something else imported, for example a notebook, and that may have changed since."""
    return [
        name
        for name, module in modules.items()
        if name != MAIN and type(_loader(module)) is SourceFileLoader and executed_source(module) is None
    ]


def forget_changed(folder: Path | None) -> None:
    """Remove own modules from `sys.modules` if a file of them changed, and those of another job's folder.

    If one file changed, all own modules are removed: others have imported names from it.
    """
    recorded = _recorded()
    changed = {loader.path for loader in recorded.values() if _content(loader.path) != loader.source}
    _reloaded.update(changed)
    packages = {name for name, own in _folder_of_package.items() if changed or own != folder}
    inside = {name for name in list(sys.modules) if name.partition(".")[0] in packages}
    forget(inside | set(recorded) if changed else inside)
    for name in packages:
        del _folder_of_package[name]


def forget(names: Iterable[str]) -> None:
    """Remove modules, so that the next import executes them again. Objects of the old modules stay usable."""
    for name in set(names) - {MAIN}:
        module = sys.modules.pop(name, None)
        package, _, attribute = name.rpartition(".")
        # `from package import module` would return the old module, which is an attribute of the package.
        if module is not None and vars(sys.modules.get(package, sys)).get(attribute) is module:
            delattr(sys.modules[package], attribute)


def note_reloaded(modules: Iterable[ModuleType]) -> None:
    _reloaded.update(str(module.__file__) for module in modules)


def take_reloaded() -> list[str]:
    """Return the files that were executed again since the last call."""
    files = sorted(_reloaded)
    _reloaded.clear()
    return files


def _recorded() -> dict[str, OwnCodeLoader]:
    """Return the loaders of all modules whose executed source is known, by the names of the modules."""
    loaders = {name: _loader(module) for name, module in list(sys.modules.items())}
    return {name: loader for name, loader in loaders.items() if isinstance(loader, OwnCodeLoader)}


def _loader(module: Any) -> Any:
    spec = getattr(module, "__spec__", None)
    return None if spec is None else spec.loader


def _imports(module: ModuleType) -> Iterator[str]:
    """Yield the names that the source of a module imports, also inside functions."""
    import ast

    source = executed_source(module) or _content(str(module.__file__))
    try:
        tree = ast.parse(source or b"")
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):
                package = resolve_name("." * node.level + (node.module or ""), module.__package__)
                yield from (f"{package}.{alias.name}" for alias in node.names)


def _content(file: str) -> bytes | None:
    try:
        return Path(file).read_bytes()
    except OSError:
        return None


@cache
def _process_start_seconds() -> float:
    """Return a time shortly before the start of this process, or 0 if it is unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text("utf-8").splitlines() if line.startswith("btime "))
        # The time of the boot has whole seconds, so the result can be late by one.
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK") - 2
    except (OSError, ValueError, IndexError, StopIteration):
        return 0.0


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
