"""Versions of the GPU compiler that fit jax, and those that do not."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from error_assertions import raises_error

from forerun.installation import install_command
from forerun.planner.compile import installed_compilers
from forerun.planner.compile.installed_compilers import GPU, plugin_problem
from forerun.upgrade import meets

ROOT = Path(__file__).resolve().parents[4]

PIN = 'jax-cuda13-plugin<=0.10.2,>=0.10.2; extra == "cuda13-local"'


def versions(plugin: str = "0.10.2", runtime: str | None = "0.10.2") -> dict[str, str]:
    found = {"jax": "0.10.2", "jax-cuda13-plugin": plugin}
    return found if runtime is None else found | {"jax-cuda13-pjrt": runtime}


def test_versions_that_fit() -> None:
    assert plugin_problem(versions(), [PIN]) is None
    assert plugin_problem(versions(), []) is None
    assert plugin_problem({"jax": "0.10.2"}, [PIN]) is None
    # jax decides which plugin it works with: a patch release of jax may keep the plugin.
    assert plugin_problem(versions() | {"jax": "0.10.3"}, [PIN]) is None


@pytest.mark.parametrize("requirements", [[PIN], []])
def test_another_release_is_named(requirements: list[str]) -> None:
    found = plugin_problem(versions("0.12.0", "0.12.0"), requirements)
    assert found is not None
    assert "jax-cuda13-plugin 0.12.0" in found
    assert "jax 0.10.2" in found


def test_both_plugins_are_of_one_release() -> None:
    assert "jax-cuda13-pjrt 0.9.0" in str(plugin_problem(versions(runtime="0.9.0"), [PIN]))
    assert "jax-cuda13-pjrt" in str(plugin_problem(versions(runtime=None), [PIN]))


def test_plan_reports_a_mismatch_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_compilers, "find_spec", lambda name: name)
    monkeypatch.setattr(installed_compilers, "_versions", lambda: versions("0.12.0", "0.12.0"))
    with raises_error("E-PLAN-027") as raised:
        GPU.require()
    assert raised.value.fix == install_command("plan-gpu")


def test_the_extra_is_the_one_of_jax_that_pins_only_the_plugins() -> None:
    """jax's own metadata is the oracle: its extra has the plugin of its release, without the packages of CUDA."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (wanted,) = extras["plan-gpu"]
    name = wanted.removeprefix("jax[").removesuffix("]")
    pins = [line for line in metadata.requires("jax") or () if line.endswith(f'extra == "{name}"')]
    assert sorted(re.split(r"[<>=\[ ]", line)[0] for line in pins) == ["jax-cuda13-plugin", "jaxlib"]
    assert not any("with-cuda" in line for line in pins)
    assert all(meets(metadata.version("jax"), line) for line in pins)


@pytest.mark.parametrize("lock", ["py311", "py313"])
def test_locks_have_the_plugins_of_their_jax(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.lock").read_text("utf-8")
    found = dict(re.findall(r"^(jax|jax-cuda13-plugin|jax-cuda13-pjrt)(?:\[[^\]]*\])?==(\S+)", text, re.MULTILINE))
    assert len(found) == 3
    assert len(set(found.values())) == 1
    assert "nvidia-" not in text, "the compiler needs no package of CUDA"


def test_no_gpu_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_compilers, "find_spec", lambda name: None)
    with raises_error("E-PLAN-004") as raised:
        GPU.require()
    assert raised.value.fix == install_command("plan-gpu")
