"""Where the record of a run is: found by the run's name, or given by its address."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from forerun.cloud import labels
from forerun.cloud.provider import CloudUnavailable, Provider, Resource
from forerun.cloud.record.run_files import RunFiles
from forerun.cloud.view.project_state import list_resources
from forerun.errors import UserError
from forerun.storage.address import Address


def is_address(name: str) -> bool:
    """Return whether a word is the address of a run's folder, not its name."""
    return Address.of(name).is_remote or name.startswith(("/", "./", "../"))


def run_at(address: str) -> RunFiles:
    """Return the record at an address. Raise UserError if the folder has none."""
    files = RunFiles(address.rstrip("/"))
    if files.run() is None:
        raise _not_found(address, "the folder has no file cloud/run.json")
    return files


def locate_run(name: str, resources: Callable[[], Iterable[Resource]], known: Sequence[str]) -> RunFiles:
    """Return the record of a run.

    A run with resources is found by their metadata, from any machine. A run without resources is found if this machine
    has started or listed it before.

    Args:
      name: the name of the run, or the address of its folder.
      resources: lists what exists in the cloud. It is called only for a name.
      known: folders of runs that this machine has started or listed.
    """
    if is_address(name):
        return run_at(name)
    label, unlisted = labels.run_label(name), None
    try:
        found = {
            one.metadata[labels.FOLDER]
            for one in resources()
            if one.labels.get(labels.RUN) == label and one.metadata.get(labels.FOLDER)
        }
    except (CloudUnavailable, UserError) as error:
        found, unlisted = set(), error
    if not found:
        found = {folder for folder in known if folder.rpartition("/")[2] in (name, label) and _has_record(folder)}
    if len(found) > 1:
        raise UserError(
            "E-CLOUD-066",
            f"several runs have the name {name}",
            why=f"their folders are {', '.join(sorted(found))}",
            fix=f"give the address of one of them instead of its name: {min(found)}",
        )
    if not found:
        if unlisted is not None:
            raise unlisted
        raise _not_found(
            name, "no resource of the project has its label, and this machine has not started or listed it"
        )
    return RunFiles(found.pop())


def find_run(name: str, providers: Callable[[], Sequence[Provider]]) -> RunFiles:
    """Return the record of a run, by the resources of the providers, the runs of this machine, or its address."""

    def resources() -> Sequence[Resource]:
        found, errors = list_resources(providers())
        if errors and not found:
            raise errors[0]
        return found

    files = locate_run(name, resources, known_runs())
    remember_runs([files.address])
    return files


def _has_record(folder: str) -> bool:
    """Return whether a folder has the record of a run. A folder that cannot be read has none."""
    try:
        return RunFiles(folder).run() is not None
    except (UserError, OSError, ValueError):
        return False


def _not_found(name: str, why: str) -> UserError:
    return UserError(
        "E-CLOUD-065",
        f"there is no cloud run {name}",
        why=why,
        fix="see the names with forerun ps --all, or give the address of the run's folder, such as gs://bucket/runs/a",
    )


MOST_RUNS = 50


def list_file(environment: Mapping[str, str] | None = None) -> Path:
    """Return the file with the list, in the user's configuration folder."""
    values = os.environ if environment is None else environment
    base = values.get("XDG_CONFIG_HOME") or os.path.join(values.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base) / "forerun" / "cloud-runs"


def known_runs(file: Path | None = None) -> tuple[str, ...]:
    """Return the folders of runs, such as `gs://bucket/runs/quickstart`. The newest comes first."""
    try:
        lines = (file or list_file()).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))


def remember_runs(folders: Iterable[str], file: Path | None = None) -> None:
    """Add folders of runs to the list. A list that cannot be written is not an error."""
    file, added = file or list_file(), list(folders)
    before = known_runs(file)
    if set(added) <= set(before):
        return
    lines = list(dict.fromkeys((*added, *before)))[:MOST_RUNS]
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        part.replace(file)
