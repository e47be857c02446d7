"""Two hosts learn preferences with a cached reference that one of them has lost in part; `student` is a command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from runs_cached import pairs

pytestmark = [pytest.mark.slow, pytest.mark.timing]


@pytest.fixture
def _compile_quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Here and in the hosts' processes: most of the time would be LLVM's."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("_compile_quickly")
def test_hosts_go_by_what_host_0_has_of_the_reference(tmp_path: Path) -> None:
    line = pairs(tmp_path / "bench")
    assert line["ok"], line
    assert line["computed_again"], line
