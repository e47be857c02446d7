"""`code.json` of a run: where the user's own classes were when it was trained, and what their files contained.

A run's folder can come from someone else, so a path in it must not decide which code runs. The record is sealed with a
secret of the user (`forerun.loop.sealed`): only a record that this user's own `train` wrote on this machine is
followed. In all other cases the user names the folder.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.files import atomic_write, read_regular
from forerun.loop.folder import RunFolder
from forerun.loop.sealed import Sealed
from forerun.models.plugin import job_folder, plugin_files, plugin_spec, use_job_folder
from forerun.models.sizes import is_plugin
from forerun.units import MIB

CODE = "code.json"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Record:
    """The job's folder, and the digest of each file that was imported from it."""

    folder: Path
    files: dict[str, str]
    sealed: bool  # whether this user wrote it on this machine

    def changed(self, folder: Path) -> list[str]:
        """Return the files that are different in `folder`, or missing there."""
        return [name for name, digest in self.files.items() if _digest(folder / name) != digest]


def note_code(run: RunFolder, tell: Tell) -> None:
    """Write the record of a run that is about to train, if it has imported anything from the job's folder.

    `tell` gets a line if the code has changed since the run was last started.
    """
    folder, files = job_folder(), plugin_files()
    if folder is None or not files:
        return
    before = _recorded(run)
    if before is not None and (changed := before.changed(folder)):
        tell(f"{_listed(changed)} changed since this run was last started: it goes on with the new code")
    content = _content({"folder": str(folder), "files": {name: _digest(file) for name, file in files.items()}})
    try:
        seal = _seal(content)
    except OSError:
        seal = ""  # without a home for the secret, eval and generate ask for --code
    atomic_write(run.path / CODE, json.dumps({**json.loads(content), "seal": seal}, indent=2) + "\n")


def use_code_of(source: str, run: RunFolder, job: Job | None, given: str | None, tell: Tell) -> None:
    """Make the class that a run's job names as its model importable.

    Args:
      source: what the user called the run, for the texts of errors.
      job: None if `source` is not a run.
      given: the folder that the user named, which has priority over the recorded one.
      tell: gets a line if the code is not the code that the run was trained with.
    """
    if job is None or not is_plugin(job.model):
        if given is not None:
            raise UserError(
                f"--code {given}: {source} needs no code",
                why="the option is for a run whose model is a class of your own",
                fix="leave --code out",
            )
        return
    module = str(job.model.name).partition(":")[0]
    package = module.partition(".")[0]
    record = _recorded(run)
    if given is not None:
        folder = Path(given).expanduser()
        use_job_folder(folder)
        if plugin_spec(package) is None:
            use_job_folder(None)
            raise UserError(
                f"--code {given} has no module {package!r}",
                why=f"the run's model is {job.model.name}",
                fix=f"give the folder that has {package}.py",
            )
    elif find_spec(package) is not None:
        return  # an installed package; installed packages have priority over all folders
    else:
        folder = _recorded_folder(source, record, package)
        use_job_folder(folder)
    if record is not None and (changed := record.changed(folder)):
        tell(f"{_listed(changed)} in {folder} changed since {source} was trained: results can differ")


def _recorded_folder(source: str, record: Record | None, package: str) -> Path:
    """Return the folder that the record names, if it may be used and has the module."""
    if record is None:
        why = f"{source} has no readable {CODE}, which names the folder"
    elif not record.sealed:
        why = f"code is imported from {record.folder} only if your own `forerun train` noted it on this machine"
    elif not any((record.folder / name).exists() for name in (f"{package}.py", package)):
        why = f"it was in {record.folder} when the run was trained, and is not there now"
    else:
        return record.folder
    raise UserError(
        f"the code of {source} was not found: module {package!r}",
        why=why,
        fix=f"add --code FOLDER, with the folder that has {package}.py",
    )


def _recorded(run: RunFolder) -> Record | None:
    """Return the record of a run, or None if there is none that can be read."""
    try:
        content = json.loads(read_regular(run.path / CODE, MIB))
        seal = str(content.pop("seal"))
        files = {str(name): str(digest) for name, digest in dict(content["files"]).items()}
        folder = Path(str(content["folder"]))
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError):
        return None
    try:
        sealed = hmac.compare_digest(seal.encode(), _seal(_content(content)).encode())
    except OSError:
        sealed = False
    return Record(folder, files, sealed)


def _content(record: Any) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _seal(content: bytes) -> str:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Sealed(cache / "forerun" / "code").digest(CODE, content).hex()


def _digest(file: Path) -> str | None:
    try:
        return hashlib.sha256(read_regular(file, 64 * MIB)).hexdigest()
    except (OSError, UserError):
        return None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
