"""The compiler options for each kind of device, each with its reason. This module does not import jax.

`plan` and `train` use the same table, so the planned program is the one that runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import UserError, first_line
from forerun.hardware.mesh import MeshShape
from forerun.units import MIB

Value = str | bool | int | float
FROM_JOB = "the job's"


@dataclass(frozen=True)
class Option:
    """A compiler option, its value, and why it has this value."""

    name: str
    value: Value
    reason: str


@dataclass(frozen=True)
class CompilerOptions:
    """The options of one program: `values` for the compiler, `reasons` for the user."""

    values: dict[str, Value] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def by_reason(self) -> dict[str, list[str]]:
        """Return each reason with its options as `name=value`."""
        found: dict[str, list[str]] = {}
        for name, value in self.values.items():
            found.setdefault(self.reasons[name], []).append(f"{name}={_text(value)}")
        return found


_GATHER_EARLY = "weights are gathered while matmuls that do not need them run"
_NO_WINDOWS = "complete matmuls after a gather are faster than matmuls in steps that wait for their transfers"
_SPARSE_CORES = "sparse cores move data while the matrix units compute; their speed is assumed, not measured"
_LARGE_BLOCKS = Option("xla_tpu_scoped_vmem_limit_kib", "98304", "larger blocks of matmuls fit the memory")
_WITHOUT_WINDOWS = (
    Option("xla_tpu_enable_windowed_einsum_for_all_gather", "false", _NO_WINDOWS),
    Option("xla_tpu_enable_windowed_einsum_for_reduce_scatter", "false", _NO_WINDOWS),
)
_ON_SPARSE_CORES = (
    Option("xla_tpu_enable_sparse_core_collective_offload_all_gather", "true", _SPARSE_CORES),
    Option("xla_tpu_enable_sparse_core_collective_offload_all_reduce", "true", _SPARSE_CORES),
    Option("xla_tpu_enable_sparse_core_collective_offload_reduce_scatter", "true", _SPARSE_CORES),
    Option("xla_tpu_use_tc_device_shape_on_sc", "true", _SPARSE_CORES),
    Option("xla_sc_disable_megacore_partitioning", "true", _SPARSE_CORES),
)
# For each kind of device, the options of each layout. bench/compiler_options.py compares them with the earlier ones.
_TPU: dict[str, tuple[tuple[Callable[[MeshShape], bool], tuple[Option, ...]], ...]] = {
    "TPU v5 lite": (
        # Only on v5e: for other chips, the compiler of libtpu 0.0.50 rejects this fusion, because it may give wrong
        # results or hang. Older versions accept it silently.
        (
            lambda mesh: mesh.devices > 1,
            (
                Option("xla_tpu_enable_async_collective_fusion", "true", _GATHER_EARLY),
                Option("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true", _GATHER_EARLY),
                Option("xla_tpu_overlap_compute_collective_tc", "true", _GATHER_EARLY),
                Option("xla_enable_async_all_gather", "true", _GATHER_EARLY),
            ),
        ),
        (lambda mesh: mesh.tp > 1, _WITHOUT_WINDOWS),
    ),
    "TPU v6 lite": (
        (lambda mesh: True, (_LARGE_BLOCKS,)),
        (lambda mesh: mesh.devices > 1, _WITHOUT_WINDOWS + _ON_SPARSE_CORES),
    ),
}
_COMBINE = "a small collective overlaps with the previous matmul, a combined one delays the next (bench/gpu_overlap.py)"
_GPU = (
    # Triton's matmuls need autotuning on the device, so `plan` would compile another program than `train`.
    Option("xla_gpu_enable_triton_gemm", False, "cuBLAS computes all matmuls, so plan compiles what train runs"),
    Option("xla_gpu_enable_latency_hiding_scheduler", True, "collectives start early"),
    # Collectives smaller than this are combined. XLA combines up to 30 MB, and recipes for other trainers up to 8 GiB.
    # Our step gathers each weight right before its matmul.
    Option("xla_gpu_all_gather_combine_threshold_bytes", 8 * MIB, _COMBINE),
    Option("xla_gpu_reduce_scatter_combine_threshold_bytes", 8 * MIB, _COMBINE),
)
# Options of a job that another platform's compiler does not know. They are ignored there, so that a job for TPUs also
# runs on a CPU.
_FOREIGN = {
    "tpu": re.compile("xla_(gpu|cpu)_"),
    "gpu": re.compile("xla_(tpu|cpu|sc|jf)_"),
    "cpu": re.compile("xla_(?!cpu_|llvm_)"),
}
# libtpu 0.0.50 says of these that they may give wrong results or hang, except on v5e.
_UNSAFE = re.compile("xla_tpu_enable_async_collective_fusion_fuse_all_gather")
_WITHOUT_DANGER = ("TPU v5 lite",)


def compiler_options(
    platform: str, device_kind: str, mesh: MeshShape, own: Mapping[str, Value | None] | None = None
) -> CompilerOptions:
    """Return the options for `lowered.compile`: strings for the TPU compiler, typed values for the GPU compiler.

    A device without an entry uses the compiler's defaults.

    Args:
      platform: the platform of the device, for example "tpu".
      device_kind: JAX's name of the device, for example "TPU v6 lite".
      mesh: the layout of the devices.
      own: the job's `compiler_options`, which replace or extend those of the table. None removes an option.

    Raises:
      UserError: an option of the job is unsafe on this kind of device.
    """
    platform = "gpu" if platform == "cuda" else platform
    table: list[Option] = []
    if platform == "gpu":
        table = list(_GPU)
    elif platform == "tpu":
        table = [option for applies, options in _TPU.get(device_kind, ()) if applies(mesh) for option in options]
    chosen = {option.name: (option.value, option.reason) for option in table}
    for name, value in (own or {}).items():
        if platform not in _FOREIGN or _FOREIGN[platform].match(name):
            continue
        is_on = value is not None and str(value).lower() not in ("false", "0")
        if is_on and platform == "tpu" and device_kind not in _WITHOUT_DANGER and _UNSAFE.match(name):
            raise UserError(
                "E-JOB-155",
                f"compiler_options.{name} is unsafe on {device_kind}",
                why="libtpu 0.0.50 rejects it there, because the program may give wrong results or hang",
                fix=f"remove compiler_options.{name}",
            )
        chosen.pop(name, None)
        if value is not None:
            chosen[name] = (_text(value) if platform == "tpu" else value, FROM_JOB)
    return CompilerOptions(
        {name: value for name, (value, _) in chosen.items()}, {name: reason for name, (_, reason) in chosen.items()}
    )


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def compile_lowered(lowered: Any, options: Mapping[str, Value]) -> Any:
    """Compile a lowered program, and return the executable.

    Raises:
      UserError: the compiler does not know an option, or does not accept its value.
    """
    try:
        return lowered.compile(compiler_options=dict(options) or None)
    except RuntimeError as error:
        found = _REJECTED.search(str(error))
        if found is None:
            raise
        raise UserError(
            "E-COMMAND-097",
            f"the compiler does not accept the option {found['unknown'] or found['name']}",
            why=first_line(error),
            fix="check its name and value in compiler_options, or remove it; other versions of jax have other options",
        ) from error


_REJECTED = re.compile(r"No such compile option: '(?P<unknown>\w+)'|Failed to parse .{0,200} into flag (?P<name>\w+)")
