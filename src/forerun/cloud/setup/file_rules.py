"""The rules for local files that travel to rented machines.

A job names files and folders. From a named folder, these entries are skipped and reported:

1. hidden files and folders (`.env`, `.git`), and `__pycache__`,
2. names of keys and credentials (`PRIVATE_NAMES`), in upper or lower case,
3. what the patterns in `.forerunignore` match, with the syntax of `.gitignore`,
4. everything but regular files: sockets, pipes, devices, broken links, and links to other folders.

A link to a file is followed inside of the named folder. A link that leaves the folder is an error. A file or folder
that the job itself names is an error if a rule excludes it, because the job cannot work without it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from forerun.errors import UserError
from forerun.files import open_regular
from forerun.installation import install_command

IGNORE_FILE = ".forerunignore"
# Names, in lower case, under which tools store keys and credentials.
PRIVATE_FOLDERS = (".aws", ".azure", ".config", ".docker", ".gnupg", ".kube", ".ssh", "gcloud")
PRIVATE_NAMES = (
    *PRIVATE_FOLDERS,
    *("*.env", ".env*", ".git-credentials", ".htpasswd", ".netrc", ".npmrc", ".pgpass", ".pypirc", "_netrc"),
    *("id_dsa*", "id_ecdsa*", "id_ed25519*", "id_rsa*", "ssh_host_*_key", "authorized_keys"),
    *("*.gpg", "*.jks", "*.kdbx", "*.key", "*.keystore", "*.p12", "*.pem", "*.pfx", "*.ppk", "*.tfstate*"),
    *("*accesskeys.csv", "rootkey.csv", "*credentials", "*credentials.*", "client_secret*.json", "kubeconfig"),
    *("*service-account*.json", "*service_account*.json", "secret", "secret.*", "secrets", "secrets.*", "token"),
)
_CACHES = ("__pycache__",)


@dataclass(frozen=True)
class FolderEntry:
    """A file below a folder, or an entry that the rules skip.

    Attributes:
      path: relative to the folder.
      source: the real path of the file, or None for a skipped entry.
      reason: why the entry is skipped.
    """

    path: PurePath
    source: Path | None
    reason: str = ""


class FileRules:
    """The rules for files below `folder`, whose `.forerunignore` applies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reason(self, path: Path, *, is_folder: bool) -> str:
        """Return why the last name of `path` excludes it, or an empty text."""
        if path.name.startswith("."):
            return "hidden"
        if path.name in _CACHES:
            return "a cache"
        if is_private(path.name):
            return "the name of a credential"
        inside = os.path.relpath(path, self.folder) + ("/" if is_folder else "")
        if not inside.startswith("../") and self._ignored is not None and self._ignored.match_file(inside):
            return IGNORE_FILE
        return ""

    def reason_below(self, path: Path, folder: Path) -> str:
        """Return why a name of `path` below `folder` excludes it, or an empty text."""
        names = path.relative_to(folder).parts
        for depth in range(1, len(names) + 1):
            if reason := self.reason(folder.joinpath(*names[:depth]), is_folder=depth < len(names)):
                return reason
        return ""

    def require_named(self, key: str, path: Path, *, inside: bool) -> None:
        """Raise UserError if a file or folder that the job names must not travel.

        Args:
          key: the key of the job.
          inside: whether the path is in the folder of the job, which a link must not leave.
        """
        real = Path(os.path.realpath(path))
        if inside and not real.is_relative_to(os.path.realpath(self.folder)):
            raise link_error(path, self.folder, real)
        is_folder = real.is_dir()
        for candidate, base in ((path, self.folder), (real, Path(os.path.realpath(self.folder)))):
            folders = candidate.relative_to(base).parts if inside else candidate.parts
            if is_private(candidate.name) or any(name.lower() in PRIVATE_FOLDERS for name in folders):
                raise _named_error(key, path, "tools store keys and credentials under this name")
            if not is_folder and candidate.name.startswith("."):
                raise _named_error(key, path, "hidden files often contain credentials")
        if inside and self._ignored is not None:
            name = os.path.relpath(path, self.folder) + ("/" if is_folder else "")
            if self._ignored.match_file(name):
                raise _named_error(key, path, f"a pattern in {self.folder / IGNORE_FILE} excludes it")
        if not (is_folder or real.is_file()):
            raise no_files_error(key, path, "it is neither a file nor a folder")

    @cached_property
    def _ignored(self) -> Any:
        """The patterns of the ignore file, or None without one."""
        file = self.folder / IGNORE_FILE
        if not os.path.lexists(file):
            return None
        try:
            import pathspec
        except ImportError as error:
            raise _ignore_error(file, str(error), install_command("cloud")) from error
        try:
            with open_regular(file) as stream:
                return pathspec.GitIgnoreSpec.from_lines(stream.read().decode("utf-8").splitlines())
        except (OSError, ValueError) as error:
            raise _ignore_error(file, str(error), "correct the file: its syntax is that of .gitignore") from error


def is_private(name: str) -> bool:
    """Return whether tools store keys or credentials under this name."""
    return any(fnmatchcase(name.lower(), pattern) for pattern in PRIVATE_NAMES)


def folder_entries(folder: Path, rules: FileRules) -> Iterator[FolderEntry]:
    """Yield the files below a folder and the entries that the rules skip, in the order of their names.

    Like the reading of data on this machine, this does not enter linked folders.

    Raises:
      UserError: a link leaves the folder, or a folder cannot be read.
    """
    yield from _entries(folder, folder, rules)


def _entries(current: Path, folder: Path, rules: FileRules) -> Iterator[FolderEntry]:
    try:
        names = sorted(os.listdir(current))
    except OSError as error:
        raise no_files_error("the job", current, f"the folder cannot be read: {error.strerror}") from error
    for name in names:
        path = current / name
        entry = folder_entry(path, folder, rules)
        if entry is None:
            yield from _entries(path, folder, rules)
        else:
            yield entry


def folder_entry(path: Path, folder: Path, rules: FileRules) -> FolderEntry | None:
    """Return the entry of a path below a folder, or None for a folder that is not a link.

    Raises:
      UserError: the path is a link, or is behind a link, that leaves the folder.
    """
    inside = path.relative_to(folder)
    if reason := rules.reason(path, is_folder=path.is_dir()):
        return FolderEntry(inside, None, reason)
    real, real_folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if not os.path.exists(real):
        return FolderEntry(inside, None, "a broken link")
    if not real.is_relative_to(real_folder):
        raise link_error(path, folder, real)
    if stat.S_ISDIR(os.stat(real).st_mode):
        return FolderEntry(inside, None, "a link to a folder") if path.is_symlink() else None
    if reason := rules.reason_below(folder / real.relative_to(real_folder), folder):
        return FolderEntry(inside, None, reason)
    if not stat.S_ISREG(os.stat(real).st_mode):
        return FolderEntry(inside, None, "not a regular file")
    return FolderEntry(inside, real)


def link_error(path: Path, folder: Path, target: Path) -> UserError:
    """Return the error for a link to a file that the job does not name."""
    return UserError(
        "E-CLOUD-106",
        f"{path} is a link that leaves {folder}",
        why=f"it leads to {target}, which the job does not name, so it is not sent to rented machines",
        fix=f"copy the file into the folder, name its real path in the job, or add the link to {IGNORE_FILE}",
    )


def no_files_error(key: str, path: Path, why: str) -> UserError:
    """Return the error for a path of the job from which nothing would travel."""
    return UserError(
        "E-CLOUD-107",
        f"{key}: no file of {path} can be sent to rented machines",
        why=why,
        fix="name a regular file, or a folder that contains one; docs/cloud.md has the rules",
    )


def _named_error(key: str, path: Path, why: str) -> UserError:
    return UserError(
        "E-CLOUD-105",
        f"{key}: {path} is not sent to rented machines",
        why=why,
        fix="name another file, or copy this one to another name if its content is public",
    )


def _ignore_error(file: Path, why: str, fix: str) -> UserError:
    return UserError("E-CLOUD-108", f"{file} cannot be used", why=why, fix=fix)
