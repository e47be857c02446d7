"""What every test stands on: eight virtual CPU devices, strict dtype promotion, files in the repository's own cache.

The settings go into the environment before jax is imported, so that processes started by a test have them too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).resolve().parent
CACHE = TESTS.parent / ".cache"
PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}"
# Eight devices share the cores of a busy machine: XLA would end the process when one is a minute behind the others.
FLAGS: dict[str, int | str] = {
    "--xla_force_host_platform_device_count": 8,
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 900,
}
if version("jaxlib").startswith("0.10."):
    # The older jax has a second code generator, which needs a third of the time. The newest has only the slow one; so
    # have whole runs (e2e, faults), on both ends.
    FLAGS["--xla_cpu_use_fusion_emitters"] = "false"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["XDG_CACHE_HOME"] = str(CACHE)
os.environ["XDG_CONFIG_HOME"] = str(CACHE / "config")
# Tests start hundreds of processes: compiled modules make their imports three times as fast.
os.environ["PYTHONPYCACHEPREFIX"] = str(CACHE / "pyc")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What is printed depends on the test alone, not on the terminal that the tests are started from.
os.environ["TERM"] = "xterm"
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
# One folder per worker: jax does not write its cache atomically.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "jax" / PYTHON / os.environ.get("PYTEST_XDIST_WORKER", "main"))
for flag, value in FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()

# The same examples every time, and no deadline for one of them: what a busy machine does is no finding.
hypothesis.settings.load_profile("ci")

# Programs there run for milliseconds and compile for seconds: LLVM's optimizations would be most of the time.
QUICKLY = (
    "contract",
    "unit/cli",
    "unit/doctor",
    "unit/evaluate",
    "unit/weights_io",
    "unit/generate",
    "unit/resolve",
    "unit/run_folder",
    "unit/trained_model",
    "unit/run",
    "unit/verbs",
    "unit/methods",
    "unit/nn",
    "unit/objectives",
    "unit/program",
)
# Whole runs first, a thousand short ones last: two workers end together only if what is long does not begin last.
ORDER = ("cloud", "e2e", "docs", "faults", "aot", "real_weights", "contract")
# CI omits these tests, because `bench/ci_sample.py` gives each Python a budget. A line of the list is a test, or a
# function with all its cases. A third column names the only Python that omits the test.
_LINES = (TESTS / "outside_ci.tsv").read_text("utf-8").splitlines()
_ROWS = (line.split("\t") for line in _LINES if not line.startswith("#"))
OUTSIDE_CI = {name for _, name, *only in _ROWS if not only or PYTHON in only}
NEEDS = {
    "aot": ("libtpu", "jax_cuda13_plugin"),
    "torch": ("torch", "transformers", "lm_eval", "peft", "compressed_tensors"),
}


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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the listed tests as slow. The keyword tells `.ci/tests` that the marker is not in their source."""
    listed = not OUTSIDE_CI.isdisjoint((item.nodeid, item.nodeid.partition("[")[0]))
    if listed and item.get_closest_marker("slow") is None:
        item.add_marker(pytest.mark.slow)
        item.keywords["outside_ci"] = True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(ORDER)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).parts[0], len(places)))


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
