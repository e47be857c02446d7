"""The commands as a user has them: `forerun` on PATH, and none of the tests' own settings of jax.

Makes tests/faults/runs.py importable, which starts, holds back, kills and compares real runs.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "faults"))
TEST_SETTINGS = ("JAX_PLATFORMS", "JAX_NUMPY_DTYPE_PROMOTION", "XLA_FLAGS", "PYTHONPATH")


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user's shell. Where the package is not installed, a two-line script stands for it."""
    environment = {name: value for name, value in os.environ.items() if name not in TEST_SETTINGS}
    folder = Path(sys.executable).parent
    if shutil.which("forerun", path=str(folder)) is None:
        environment["PYTHONPATH"] = str(ROOT / "src")
        folder = tmp_path_factory.mktemp("bin")
        script = folder / "forerun"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m forerun "$@"\n')
        script.chmod(0o755)
    return {**environment, "PATH": f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"}
