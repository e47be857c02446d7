"""The compilers that `plan` runs: libtpu for TPUs, and XLA's CUDA plugin for GPUs. Neither needs the device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from forerun.errors import UserError
from forerun.hardware.chips import target_description
from forerun.hardware.slices import Slice
from forerun.installation import install_command
from forerun.units import KIB
from forerun.upgrade import meets

# The packages of jax for CUDA, newest first: the plugin, and the runtime with the compiler.
PLUGINS = tuple((f"jax-cuda{version}-plugin", f"jax-cuda{version}-pjrt") for version in (13, 12))


@dataclass(frozen=True)
class InstalledCompiler:
    """How `plan` runs the compiler of a platform."""

    name: str  # in messages
    packages: tuple[str, ...]  # one of them must be installed
    package_text: str
    extra: str  # of forerun
    address_space_bytes: int
    flags: str = ""  # for XLA_FLAGS
    environment: Mapping[str, str] = field(default_factory=dict)
    rejects: bool = True  # whether it fails on a program that is too large; otherwise our own limit decides

    def require(self) -> None:
        """Raise an error if the compiler is not installed, or in another version than jax needs."""
        if not any(find_spec(package) for package in self.packages):
            raise UserError(
                "E-PLAN-004",
                f"{self.name} is not installed",
                why=f"plan compiles with {self.package_text}",
                fix=install_command(self.extra),
            )
        if self.extra == "plan-gpu" and (problem := plugin_problem(_versions(), _jax_requirements())):
            raise UserError(
                "E-PLAN-027",
                f"{self.name} does not fit jax: {problem}",
                why="jax's CUDA plugins are released together with jax and work only with that version",
                fix=install_command(self.extra),
            )


TPU = InstalledCompiler(
    name="the TPU compiler",
    packages=("libtpu",),
    package_text="the libtpu package that this jax release pins",
    extra="plan",
    address_space_bytes=2_500_000 * KIB,  # libtpu aborts with 2,000,000 KiB; the smallest job compiles with 3,000,000
    environment={
        "TPU_SKIP_MDS_QUERY": "1",  # compiling needs no metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compilers run in parallel
    },
)
GPU = InstalledCompiler(
    name="the GPU compiler",
    packages=tuple(plugin.replace("-", "_") for plugin, _ in PLUGINS),
    package_text="jax's CUDA plugin; it needs no GPU and no driver",
    extra="plan-gpu",
    address_space_bytes=2_500_000 * KIB,
    # Without a GPU there is nothing to measure. Newer versions would spend a minute on guessing configurations.
    flags="--xla_gpu_autotune_level=0",
    rejects=False,
)


def plugin_problem(versions: Mapping[str, str], jax_requires: Iterable[str]) -> str | None:
    """Return why the installed CUDA plugins do not fit jax, or None if they do or none is installed.

    Args:
        versions: The versions of installed packages, by name.
        jax_requires: The requirements of jax, with those of its extras, which pin the plugins.
    """
    pins = {re.match(r"[\w-]+", line)[0]: line.partition(";")[0] for line in jax_requires}  # type: ignore[index]
    for plugin, runtime in PLUGINS:
        found, beside = versions.get(plugin), versions.get(runtime)
        if found is None:
            continue
        pin = pins.get(plugin, f"{plugin}=={versions.get('jax', found)}")
        if not meets(found, pin):
            return f"{plugin} {found} next to jax {versions.get('jax')}"
        if beside != found:
            return f"{plugin} {found} next to {runtime} {beside or 'that is missing'}"
        return None
    return None


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("jax", *(name for pair in PLUGINS for name in pair)):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@cache
def _jax_requirements() -> tuple[str, ...]:
    with suppress(metadata.PackageNotFoundError):
        return tuple(metadata.requires("jax") or ())
    return ()


def compiler_for(target: Slice) -> InstalledCompiler:
    """Return the compiler of a slice or GPU machine."""
    return GPU if target.platform == "gpu" else TPU


def require_compilers(targets: Iterable[Slice]) -> None:
    """Raise an error if the compiler of one of the slices or machines is not installed."""
    for target in targets:
        compiler_for(target).require()


def compile_only_topology(target: Slice) -> Any:
    """Return jax's topology of a slice or GPU machine, with devices that can be compiled for but not used."""
    from jax.experimental import topologies

    if target.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=target.topology, **target.topology_options)
    specs, bandwidth = target.chip.gpu, target.chip.hbm_bytes_per_second
    assert specs is not None
    assert bandwidth is not None
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target_description(specs, bandwidth),
        topology=target.topology,
    )
