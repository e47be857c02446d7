"""Buckets of emulators for one test module: Google Cloud Storage and S3, each in a process of its own.

with emulated_buckets(folder) as buckets:
    buckets.address("gs")     # "gs://checkpoints/1a2b3c4d"; the variables are set in this process while the block runs
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import gcs_server

UNIT = Path(__file__).parent.parent / "unit"


@dataclass(frozen=True)
class EmulatedBuckets:
    addresses: dict[str, str]

    def address(self, protocol: str) -> str:
        return self.addresses[protocol]


@contextmanager
def emulated_buckets(folder: Path) -> Iterator[EmulatedBuckets]:
    s3 = _module("data/source/store_server.py")
    with s3.s3_emulator() as second:
        settings = _gcs_environment() | second.environment | {"XDG_CACHE_HOME": str(folder / "cache")}
        with mock.patch.dict(os.environ, settings):
            addresses = {"gs": f"gs://{gcs_server.BUCKET}", "s3": f"s3://{s3.BUCKET}"}
            yield EmulatedBuckets({key: f"{address}/{secrets.token_hex(4)}" for key, address in addresses.items()})


@cache
def _gcs_environment() -> dict[str, str]:
    """Start the emulator of Google Cloud Storage until the process ends. TensorStore uses only the first address."""
    folder = tempfile.mkdtemp()
    server = gcs_server.bucket(Path(folder))
    environment = server.__enter__()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.__exit__, None, None, None)
    return environment


def _module(path: str) -> ModuleType:
    name = f"emulator_{Path(path).stem}"
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, UNIT / path)
        assert found is not None
        assert found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name]
