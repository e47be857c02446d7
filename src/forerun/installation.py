"""The command that adds an optional dependency to this installation of forerun.

forerun may come from a clone, a wheel file, a repository or a package index. `direct_url.json` of the installed
distribution records which (PEP 610); without that file, it came from an index.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "forerun"
SOURCE = Path(__file__).resolve().parents[2]  # the clone, if forerun runs from one


def install_command(extra: str | None = None, found: Distribution | None = None) -> str:
    """Return the command that installs forerun again, with `extra`, from where this installation came from.

    If that place no longer exists, the command names the packages of the extra.

    Args:
        extra: A key of `project.optional-dependencies`, or None for the dependencies of every installation.
        found: The distribution to which the extra is added, by default the installed one.
    """
    found = found or _installed()
    return shlex.join([*_installer(found), *_requirements(found, extra)])


def _installed() -> Distribution | None:
    try:
        return importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:  # imported from a clone that is not installed
        return None


def _requirements(found: Distribution | None, extra: str | None) -> list[str]:
    extras = f"[{extra}]" if extra else ""
    if found is None:
        return [f"{SOURCE}{extras}"] if (SOURCE / "pyproject.toml").is_file() else [f"{NAME}{extras}"]
    origin = _origin(found)
    url = str(origin.get("url", ""))
    if not url:
        return [f"{NAME}{extras}"]
    folder = unquote(urlsplit(url).path) if url.startswith("file:") else None
    if "vcs_info" in origin:
        return [f"{NAME}{extras} @ {_repository(url, origin)}"]
    if folder is not None and not os.path.exists(folder):
        return _packages(found, extra)
    if folder is not None and "dir_info" in origin:
        editable = ["-e"] if origin["dir_info"].get("editable") else []
        return [*editable, f"{folder}{extras}"]
    return [f"{NAME}{extras} @ {url}"]


def _origin(found: Distribution) -> dict[str, Any]:
    try:
        content = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _repository(url: str, origin: dict[str, Any]) -> str:
    """Return the address of a version control system as pip reads it: `git+https://host/forerun@main`."""
    info = origin["vcs_info"]
    revision = info.get("requested_revision") or info.get("commit_id")
    folder = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
    return f"{info.get('vcs', 'git')}+{url}" + (f"@{revision}" if revision else "") + folder


def _packages(found: Distribution, extra: str | None) -> list[str]:
    """Return the packages that the distribution requires for `extra`, or without an extra if it is None."""
    wanted = f"extra=='{extra}'" if extra else ""
    split = [line.partition(";") for line in found.requires or ()]
    return [
        package.strip() for package, _, marker in split if marker.replace(" ", "").replace('"', "'").strip() == wanted
    ]


def _installer(found: Distribution | None) -> list[str]:
    """Return the start of the command that installs into the running interpreter, with pip or uv."""
    scripts = Path(sys.executable).parent
    if importlib.util.find_spec("pip") is not None:
        first = shutil.which("pip")
        own = first is not None and Path(first).parent == scripts
        return [*(["pip"] if own else [sys.executable, "-P", "-m", "pip"]), "install"]
    if found is not None and (found.read_text("INSTALLER") or "").strip() == "uv":
        active = os.environ.get("VIRTUAL_ENV") == sys.prefix
        return ["uv", "pip", "install", *([] if active else ["--python", sys.executable])]
    return ["pip", "install"]
