"""What every test stands on: eight virtual CPU devices, strict dtype promotion, files in the repository's own cache.

The settings go into the environment before jax is imported, so that processes started by a test have them too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CACHE = TESTS.parent / ".cache"
PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}"
DEVICES = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["XDG_CACHE_HOME"] = str(CACHE)
# One folder per worker: jax does not write its cache atomically.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "jax" / PYTHON / os.environ.get("PYTEST_XDIST_WORKER", "main"))
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()

# Programs there run for milliseconds and compile for seconds: LLVM's optimizations would be most of the time.
QUICKLY = ("contract", "unit/evaluate", "unit/exchange", "unit/generate", "unit/nn", "unit/objectives", "unit/program")
NEEDS = {"aot": ("libtpu",), "torch": ("torch", "transformers", "lm_eval")}


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    if str(request.path.parent.relative_to(TESTS)) not in QUICKLY:
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run on this machine; in CI a missing package is a failure, never a silent skip."""
    for marker, packages in NEEDS.items():
        if item.get_closest_marker(marker) is None:
            continue
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing and os.environ.get("CI"):
            pytest.fail(f"{missing[0]} is missing, and CI must not skip tests marked {marker}", pytrace=False)
        if missing:
            pytest.skip(f"needs {missing[0]}: scripts/dev --torch sets it up")
