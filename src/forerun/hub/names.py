"""Kinds of model names: a named size, a hub repository, a local folder or a custom class.

The kind depends on the text and, for `a/b`, on whether such a folder exists. The network is never used.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from forerun.errors import UserError
from forerun.storage.address import Address

Kind = Literal["size", "repository", "folder", "plugin"]

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_PLUGIN = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MAX_REPOSITORY_CHARACTERS = 96
_PATH_STARTS = ("./", "../", "/", "~")


def kind_of(name: str) -> Kind:
    """Return the kind of a model's name. Raise a UserError for a name with a slash that has no kind."""
    if _PLUGIN.fullmatch(name):
        return "plugin"
    if is_folder(name):
        return "folder"
    if is_repository(name):
        return "repository"
    if "/" not in name:
        return "size"
    raise UserError(
        "E-HUB-017",
        f"model {name!r} is neither a hub name nor a folder",
        why=_doubt(name),
        fix="write owner/name as on the model's page (a revision has its own key), or a path that starts with ./ or /",
    )


def is_repository(name: str) -> bool:
    """Return whether `name` is a valid hub name `owner/name` and not a local folder."""
    return is_repository_text(name) and not is_folder(name)


def is_folder(name: str) -> bool:
    """Return whether `name` is a path (`./x`, `../x`, `/x`, `~/x`), or `a/b` with a config.json in that folder.

    A name without a slash is never a folder: an export to `qwen3-0.6b` must not change the meaning of that size.
    """
    if name in (".", "..") or name.startswith(_PATH_STARTS):
        return True
    return "/" in name and "\0" not in name and (Path(name) / "config.json").is_file()


def is_plugin(name: str) -> bool:
    """Return whether `name` has the form `module.path:Class`."""
    return _PLUGIN.fullmatch(name) is not None


def folder_path(name: str) -> Path:
    """Return the absolute path of the folder `name`, with `~` expanded."""
    return Path(name).expanduser().absolute()


def is_repository_text(name: str) -> bool:
    """Return whether `name` has the form of a hub name, `owner/name`."""
    return (
        len(name) <= _MAX_REPOSITORY_CHARACTERS
        and _REPOSITORY.fullmatch(name) is not None
        and "--" not in name
        and ".." not in name
        and not name.endswith(".git")
    )


def _doubt(name: str) -> str:
    """Return why `name` is not a hub name."""
    if Address.of(name).is_remote:
        return "it is a URL, not a name"
    if "@" in name:
        return "a name has no '@'"
    if name.count("/") > 1:
        return "a hub name has one slash, and that path is not a folder with a config.json"
    if len(name) > _MAX_REPOSITORY_CHARACTERS:
        return f"a hub name has at most {_MAX_REPOSITORY_CHARACTERS} characters"
    return "a hub name is owner/name in letters, digits, '-', '_' and '.', and no such folder exists"
