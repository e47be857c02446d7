"""`code.json` of a run: the user's own classes, and source and digest of all files that they consist of.

A run's folder can come from another person, so a path in it must not decide which code runs. The record is therefore
signed with a key of the user (`forerun.run_folder.user_key`). Code is imported from the recorded folder only if this
user's own `train` wrote the record on this machine. In all other cases, the user names the folder with `--code`.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import json
import linecache
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, find_spec
from pathlib import Path
from typing import Any

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.files import atomic_write, read_regular
from forerun.models.plugin import (
    MAIN,
    executed_source,
    is_own_file,
    job_folder,
    own_modules,
    plugin_spec,
    take_reloaded,
    use_job_folder,
)
from forerun.models.sizes import is_plugin
from forerun.reporter import Reporter
from forerun.run_folder.run_folder import RunFolder
from forerun.run_folder.user_key import signature, user_key
from forerun.units import MIB

CODE = "code.json"
CODE_FOLDER = "code"  # in an export: copies of the source files, which forerun does not import
CHANGED_FILE = "the file may have changed since this process imported it"
NO_SOURCE = "Python has no source of a class that was typed into an interactive session"


@dataclass(frozen=True)
class Record:
    """The folder of the user's modules, the digest of each file by its path in it, and other digests of the code."""

    folder: Path | None
    files: dict[str, str | None]
    classes: dict[str, Any]
    sealed: bool  # whether the signature is valid: this user wrote the record on this machine

    def changed(self, folder: Path | None) -> list[str]:
        """Return the files that differ in `folder` or are missing there."""
        return [] if folder is None else [name for name, sha in self.files.items() if _digest(folder / name) != sha]


def record_code(run: RunFolder, job: Job, reporter: Reporter) -> None:
    """Write the record of a run whose job names classes of the user. `train` calls this after their import.

    Args:
      run: the run's folder.
      job: the run's job.
      reporter: receives a message if edited modules were loaded again in this process, and a warning if the code has
        changed since the last start of the run.
    """
    if reloaded := take_reloaded():
        reporter.info(f"own code: loaded {_listed(reloaded)} again, because it may have changed since it was imported")
    names = class_names(job)
    if not names:
        return
    code, before = own_code(names), _recorded(run)
    files = {name: digest(source) for name, source in code.files.items()}
    if before is not None and (changed := _differences(before, files, code.classes)):
        reporter.warn(f"{_listed(changed)} changed since this run was last started: it continues with the new code")
    record = {
        "folder": None if code.folder is None else str(code.folder),
        "classes": code.classes,
        "files": files,
        "sources": {name: decode_source(source) for name, source in code.files.items() if source is not None},
    }
    content = _content(record)
    try:
        seal = _seal(content)
    except OSError:
        seal = ""  # no key can be stored, so `eval` and `generate` will ask for --code
    atomic_write(run.path / CODE, json.dumps({**json.loads(content), "seal": seal}, indent=2) + "\n")


def _differences(before: Record, files: dict[str, str | None], classes: dict[str, Any]) -> list[str]:
    """Return the files and the classes of a notebook that are not those of an earlier record."""
    changed = [name for name in sorted({*before.files, *files}) if before.files.get(name) != files.get(name)]
    return changed + [
        str(one.get("class")) for key, one in classes.items() if "file" not in one and one != before.classes.get(key)
    ]


def use_code_of(source: str, run: RunFolder, job: Job | None, given: str | None, reporter: Reporter) -> None:
    """Make the custom model class of a run importable.

    Args:
      source: the run as the user named it, for error messages.
      run: the run's folder.
      job: the run's job, or None if `source` is not a run.
      given: the folder of `--code`, which has priority over the recorded one, or None.
      reporter: receives a message if the code differs from the code that the run was trained with.

    Raises:
      UserError: the code was not found, the record cannot be trusted, or `--code` is not needed.
    """
    if job is None or not is_plugin(job.model):
        if given is not None:
            raise UserError(
                "E-RUN-011",
                f"--code {given}: {source} needs no code",
                why="the option is for a run whose model is a custom class",
                fix="remove --code",
            )
        return
    module, _, class_name = str(job.model.name).partition(":")
    if module == MAIN:
        _require_in_session(source, class_name)
        return
    package = module.partition(".")[0]
    record = _recorded(run)
    use_job_folder(None)  # modules of another job's folder are no longer importable
    folder: Path | None
    if given is not None:
        folder = Path(given).expanduser()
        use_job_folder(folder)
        if plugin_spec(package) is None:
            use_job_folder(None)
            raise _no_module(given, package, f"the run's model is {job.model.name}")
    elif (spec := find_spec(package)) is not None:  # packages on sys.path have priority over all folders
        folder = _folder_of(spec) if is_own_file(spec.origin) else None
    else:
        folder = _recorded_folder(source, record, package)
        use_job_folder(folder)
    if record is not None and (changed := record.changed(folder)):
        reporter.warn(f"{_listed(changed)} in {folder} changed since {source} was trained: results can differ")


def use_code_of_export(
    source: str, class_name: str, files: Mapping[str, str], given: str | None, reporter: Reporter
) -> None:
    """Make the custom model class of an exported folder importable, from the folder of `--code` only.

    An export can come from another person, and its config.json names the class. The class must therefore be in the
    folder that the user names. Neither the export nor installed packages are searched.

    Args:
      source: the export as the user named it.
      class_name: the class as `module.path:Class`.
      files: the digest of each source file, by its path.
      given: the folder of `--code`, or None.
      reporter: receives a message if the code differs from that of the export.
    """
    package = class_name.partition(":")[0].partition(".")[0]
    if given is None:
        why = f"{source} is an export, and the copy of the code in it is never imported unasked"
        raise _not_found(source, package, why, f"; after reading it, that can be {Path(source) / CODE_FOLDER}")
    folder = Path(given).expanduser().resolve()
    use_job_folder(folder)
    spec = plugin_spec(package)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    if not any(place is not None and Path(place).is_relative_to(folder) for place in places):
        use_job_folder(None)
        raise _no_module(given, package, f"the class of the export is {class_name}, and it must be in this folder")
    if changed := [name for name, digest in files.items() if _digest(folder / name) != digest]:
        reporter.warn(f"{_listed(changed)} in {folder} differs from the code of {source}: results can differ")


def source_files(job: Job) -> dict[str, bytes]:
    """Return the source of the model's class and of the modules that it imports, by their paths in their folder."""
    files = own_code({"model.name": str(job.model.name)}).files
    return {name: source for name, source in files.items() if source is not None and not Path(name).is_absolute()}


def changed_code(run: RunFolder, job: Job) -> list[str]:
    """Return the recorded files that differ from those from which the model's class was imported."""
    record = _recorded(run)
    return [] if record is None else record.changed(code_folder([str(job.model.name)]))


def _require_in_session(source: str, class_name: str) -> None:
    """Raise if the notebook or script, in which the model of a run was defined, does not have its class."""
    if hasattr(sys.modules[MAIN], class_name):
        return
    raise UserError(
        "E-RUN-096",
        f"the model of {source} is the class {class_name} of a notebook or script",
        why="a class that is not in a module exists only in the process that defines it",
        fix=f"define {class_name} in this notebook or script; for other commands, move it to a module and train again",
    )


def _folder_of(spec: ModuleSpec) -> Path:
    """Return the folder that contains a top-level module."""
    origin = Path(str(spec.origin)).resolve()
    return origin.parents[1] if spec.submodule_search_locations else origin.parent


def _no_module(given: str, package: str, why: str) -> UserError:
    return UserError(
        "E-RUN-012", f"--code {given} has no module {package!r}", why=why, fix=f"give the folder that has {package}.py"
    )


def _not_found(source: str, package: str, why: str, hint: str = "") -> UserError:
    return UserError(
        "E-RUN-013",
        f"the code of {source} was not found: module {package!r}",
        why=why,
        fix=f"add --code FOLDER, with the folder that has {package}.py{hint}",
    )


def _recorded_folder(source: str, record: Record | None, package: str) -> Path:
    """Return the recorded folder. Raise if it cannot be trusted or does not contain the module."""
    if record is None:
        why = f"{source} has no readable {CODE}, which names the folder"
    elif record.folder is None:
        why = f"{CODE} names no folder"
    elif not record.sealed:
        why = f"code is imported from {record.folder} only if your own `forerun train` recorded it on this machine"
    elif not any((record.folder / name).exists() for name in (f"{package}.py", package)):
        why = f"it was in {record.folder} when the run was trained, and no longer exists"
    else:
        return record.folder
    raise _not_found(source, package, why)


def _recorded(run: RunFolder) -> Record | None:
    """Return the record of a run, or None if it is missing or cannot be read."""
    try:
        content = json.loads(read_regular(run.path / CODE, 64 * MIB))
        seal = str(content.pop("seal"))
        files = {str(name): sha and str(sha) for name, sha in dict(content["files"]).items()}
        folder = content["folder"] and Path(str(content["folder"]))
        classes = dict(content["classes"])
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError):
        return None
    try:
        sealed = hmac.compare_digest(seal.encode(), _seal(_content(content)).encode())
    except OSError:
        sealed = False
    return Record(folder, files, classes, sealed)


def _content(record: Any) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _seal(content: bytes) -> str:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return signature(user_key(cache / "forerun" / "code" / "secret"), CODE, content).hex()


def _digest(file: Path) -> str | None:
    try:
        return hashlib.sha256(read_regular(file, 64 * MIB)).hexdigest()
    except (OSError, UserError):
        return None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# ---- The user's own classes and functions of a job, with the source that this process executed ----


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
