"""The compilers that `plan` runs: libtpu for TPUs, and XLA's CUDA plugin for GPUs. Neither needs the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from forerun.errors import UserError
from forerun.hardware.gpus import target_description
from forerun.hardware.slices import Slice
from forerun.installation import install_command
from forerun.units import KIB


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
        """Raise an error if the compiler is not installed."""
        if not any(find_spec(package) for package in self.packages):
            raise UserError(
                "E-PLAN-004",
                f"{self.name} is not installed",
                why=f"plan compiles with {self.package_text}",
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
    packages=("jax_cuda13_plugin", "jax_cuda12_plugin"),
    package_text="jax's CUDA plugin; it needs no GPU and no driver",
    extra="plan-gpu",
    address_space_bytes=2_500_000 * KIB,
    # Without a GPU there is nothing to measure. Newer versions would spend a minute on guessing configurations.
    flags="--xla_gpu_autotune_level=0",
    rejects=False,
)


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
