"""The wheel of the running forerun: the files of its package and its installed metadata, as one reproducible file.

The same files give the same bytes on every machine. A machine that installed the wheel therefore builds the same wheel,
and the startup script can refuse any other one by its SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

from forerun.cloud.record.entries import CloudRun
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.installation import NAME
from forerun.version import __version__

_DATE = (1980, 1, 1, 0, 0, 0)  # the first date of a zip file: times of files must not change the wheel
_METADATA = ("METADATA", "entry_points.txt", "licenses/LICENSE")
_WHEEL = "Wheel-Version: 1.0\nGenerator: forerun\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True)
class Wheel:
    """A wheel file in memory."""

    name: str
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def build_wheel(package: Path | None = None, metadata: dict[str, bytes] | None = None) -> Wheel:
    """Return the wheel of a package folder.

    Args:
      package: the folder `forerun`; by default that of the running forerun.
      metadata: the files of the folder `.dist-info`; by default those of the installed distribution.

    Raises:
      UserError: forerun is not installed, so its requirements are not known.
    """
    package = package or Path(__file__).parents[2]
    folder = f"{NAME}-{__version__}.dist-info"
    files = {f"{NAME}/{name}": content for name, content in _package_files(package).items()}
    files |= {f"{folder}/{name}": content for name, content in (metadata or _installed_metadata()).items()}
    files[f"{folder}/WHEEL"] = _WHEEL.encode()
    files[f"{folder}/RECORD"] = _record(files, f"{folder}/RECORD")
    # The record comes last, as the specification of wheels recommends.
    names = sorted(files, key=lambda name: (name.endswith("/RECORD"), ".dist-info/" in name, name))
    stream = io.BytesIO()
    # Not compressed: other versions of zlib would give other bytes. The ssh connection compresses.
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, _DATE)
            entry.create_system = 3  # Unix, also if it is built elsewhere
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, files[name])
    return Wheel(f"{NAME}-{__version__}-py3-none-any.whl", stream.getvalue())


def _package_files(package: Path) -> dict[str, bytes]:
    found = {}
    for file in sorted(package.rglob("*")):
        inside = file.relative_to(package)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
        if file.is_file() and not hidden and file.suffix not in (".pyc", ".pyo"):
            found[inside.as_posix()] = file.read_bytes()
    return found


def _installed_metadata() -> dict[str, bytes]:
    try:
        installed = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "E-CLOUD-030",
            "forerun is not installed, so it cannot be sent to rented machines",
            why="the wheel needs the metadata of an installation, and this forerun runs from a folder of files",
            fix='run `pip install -e ".[cloud]"` in the clone of forerun',
        ) from None
    contents = {name: installed.read_text(name) for name in _METADATA}
    return {name: content.encode() for name, content in contents.items() if content is not None}


def _record(files: dict[str, bytes], own_name: str) -> bytes:
    lines = []
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(files[name])}")
    return "\n".join([*lines, f"{own_name},,"]).encode() + b"\n"


WHEEL = "wheel"  # the key of `CloudRun.versions` with the SHA-256
KEPT = 10  # wheels of the newest plans


def wheel_folder() -> Path:
    """Return the folder with the wheels of this user's runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun" / "wheels"


def keep_wheel() -> str:
    """Store the wheel of the running forerun, and return its SHA-256 for `CloudRun.versions`."""
    wheel = build_wheel()
    file = wheel_folder() / wheel.sha256 / wheel.name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, wheel.content)
        kept = sorted(wheel_folder().glob("*/*.whl"), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in kept[KEPT:]:
            old.unlink(missing_ok=True)
            old.parent.rmdir()
    return wheel.sha256


def planned_wheel(run: CloudRun) -> Wheel:
    """Return the wheel of the forerun that planned a run; the running one if the record does not name it.

    Raises:
      UserError: this machine does not have it.
    """
    wanted = run.versions.get(WHEEL)
    for file in (wheel_folder() / wanted).glob("*.whl") if wanted else ():
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() == wanted:
            return Wheel(file.name, content)
    wheel = build_wheel()
    if wanted is not None and wheel.sha256 != wanted:
        raise UserError(
            "E-CLOUD-049",
            f"this is not the forerun that planned the run {run.name}",
            why=f"the run was planned with the wheel {wanted[:12]}, and this machine has {wheel.sha256[:12]}",
            fix="start the run's own command again: it plans with this version, and resumes from the checkpoints",
        )
    return wheel
