"""The real models, for the tests beside this file: a visible skip where their registry does not answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).resolve().parents[1])
if TESTS not in sys.path:
    sys.path.append(TESTS)

from real_weights import folders, registry  # noqa: E402


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return registry.or_skip(folders.smollm2_folder)


@pytest.fixture(scope="session")
def stories_folder() -> Path:
    return registry.or_skip(folders.stories_folder)


@pytest.fixture(scope="session")
def stories_file() -> Path:
    """llama2.c's own checkpoint and vocabulary, one after the other."""
    return registry.or_skip(registry.STORIES.file)
