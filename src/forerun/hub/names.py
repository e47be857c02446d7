"""What a model's name means: a named size, a repository of the hub, a local folder, or a class of the user's own.

Told from the text and, for `a/b`, from whether such a folder is here. Never touches the network.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from forerun.errors import UserError

Kind = Literal["size", "repository", "folder", "plugin"]

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_PLUGIN = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MAX_REPOSITORY_CHARACTERS = 96
_PATH_STARTS = ("./", "../", "/", "~")


def kind_of(name: str) -> Kind:
    """What `name` means; a name with a slash that means nothing is the user's mistake."""
    if _PLUGIN.fullmatch(name):
        return "plugin"
    if is_folder(name):
        return "folder"
    if is_repository(name):
        return "repository"
    if "/" not in name:
        return "size"
    raise UserError(
        f"model {name!r} is neither a hub name nor a folder",
        why=_doubt(name),
        fix="write owner/name as on the model's page (a revision has its own key), or a path that starts with ./ or /",
    )


def is_repository(name: str) -> bool:
    """`owner/name` by the hub's rules, unless a folder of that name is here."""
    return _is_repository_text(name) and not is_folder(name)


def is_folder(name: str) -> bool:
    """A path written as one (`./x`, `../x`, `/x`, `~/x`), or `a/b` where a folder with a config.json is.

    A name without a slash is never a folder: exporting to `qwen3-0.6b` must not change what that size means.
    """
    if name in (".", "..") or name.startswith(_PATH_STARTS):
        return True
    return "/" in name and "\0" not in name and (Path(name) / "config.json").is_file()


def is_plugin(name: str) -> bool:
    """`module.path:Class`."""
    return _PLUGIN.fullmatch(name) is not None


def folder_path(name: str) -> Path:
    """The folder that `name` means, absolute, `~` filled in."""
    return Path(name).expanduser().absolute()


def _is_repository_text(name: str) -> bool:
    return (
        len(name) <= _MAX_REPOSITORY_CHARACTERS
        and _REPOSITORY.fullmatch(name) is not None
        and "--" not in name
        and ".." not in name
        and not name.endswith(".git")
    )


def _doubt(name: str) -> str:
    if "://" in name:
        return "it is an address, not a name"
    if "@" in name:
        return "a name has no '@'"
    if name.count("/") > 1:
        return "a hub name has one slash, and no folder with a config.json is at that path"
    if len(name) > _MAX_REPOSITORY_CHARACTERS:
        return f"a hub name has at most {_MAX_REPOSITORY_CHARACTERS} characters"
    return "a hub name is owner/name in letters, digits, '-', '_' and '.', and no such folder is here"
