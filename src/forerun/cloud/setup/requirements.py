"""The locked requirements of a rented machine: exact versions with SHA-256, for one Python and one device."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import UserError

LOCKS = Path(__file__).parent / "locks"
PYTHONS = ("3.11", "3.12", "3.13")
# Packages that only one kind of device needs. A lock has them all; `locked_requirements` selects.
_ONLY_FOR = {"tpu": re.compile(r"libtpu"), "gpu": re.compile(r"(nvidia|jax-cuda).*")}
_BLOCK = re.compile(r"^(?P<name>[a-z0-9._-]+)==(?P<version>[^ ]+) \\\n(?:    .*\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Requirements:
    """The lines of a requirements file that `pip install --require-hashes` accepts."""

    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def versions(self) -> Mapping[str, str]:
        """Return the version of each package."""
        return {block["name"]: block["version"] for block in _BLOCK.finditer(self.content.decode())}


def running_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def locked_requirements(device: str, python: str | None = None) -> Requirements:
    """Return the requirements for `tpu`, `gpu` or `cpu` and a version of Python.

    Args:
      device: packages of other devices are omitted.
      python: such as `3.11`; by default the running one, because it has planned the job.

    Raises:
      UserError: no lock exists for this version of Python.
    """
    python = python or running_python()
    if python not in PYTHONS:
        raise UserError(
            "E-CLOUD-031",
            f"no locked requirements for Python {python}",
            why=f"rented machines get the Python that planned the job, and the locks are for {', '.join(PYTHONS)}",
            fix="install forerun with one of these versions, and run the command again",
        )
    text = (LOCKS / f"py{python.replace('.', '')}.lock").read_text(encoding="utf-8")
    unneeded = [names for name, names in _ONLY_FOR.items() if name != device]
    blocks = [
        block[0] for block in _BLOCK.finditer(text) if not any(names.fullmatch(block["name"]) for names in unneeded)
    ]
    return Requirements("".join(blocks).encode())


def uv_requirement() -> str:
    """Return the line of requirements that installs uv, with its hashes."""
    block = _BLOCK.search((LOCKS / "uv.lock").read_text(encoding="utf-8"))
    assert block is not None
    return re.sub(r"\s*\\\n\s*", " ", block[0]).strip()
