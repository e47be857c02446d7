"""The choice of devices for a job, with the reason.

Cheap checks of the machine come first. jax opens only a platform that they have not ruled out.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forerun.errors import UserError
from forerun.hardware.device_memory import reserve_memory_share
from forerun.hardware.gpu_errors import gpu_cause
from forerun.installation import install_command

ORDER = ("tpu", "gpu", "cpu")
_LABELS = {"tpu": "TPU", "gpu": "GPU", "cpu": "CPU"}
_TPU_HINTS = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_NAME")
_GOOGLE = "0x1ae0"
# PCI ids of v2/v3, v4, v5p, v5e, v6e, tpu7x. The vendor is not enough: Google's network card has the same one.
_TPU_PCI_IDS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
_GPU_FILES = ("dev/nvidia0", "dev/nvidiactl", "dev/dxg", "dev/kfd")
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_ROCM_PLUGINS = ("jax_rocm60_plugin", "jax_rocm7_plugin")


@dataclass(frozen=True)
class DeviceChoice:
    """The devices of a run."""

    platform: str
    devices: tuple[Any, ...]
    reason: str  # always shown to the user
    warning: str | None = None
    slices: int | None = None  # that take part in the run at the moment; None if all of the job's slices do


@dataclass(frozen=True)
class Absence:
    """The reason why a platform cannot be used, and its fix."""

    why: str
    fix: str
    attached: bool = False  # whether its hardware exists in this machine nevertheless


class Probe(Protocol):
    """The interface of a machine that `choose` needs."""

    def absence(self, platform: str) -> Absence | None:
        """Return why the platform cannot be used, without loading its runtime; None if it may be usable."""

    def devices(self, platform: str) -> tuple[Any, ...]:
        """Return the platform's jax devices; raise RuntimeError if there are none."""


def choose(device: str | tuple[str, ...], count: int | None, probe: Probe | None = None) -> DeviceChoice:
    """Return the devices for the keys `device` and `devices` of a job.

    Args:
        device: `auto` tries TPU, then GPU, then CPU. A tuple is tried in its order, with a warning if its first
            platform cannot be used.
        count: Number of devices; None is all.
        probe: The machine to examine; this machine by default.

    Raises:
        UserError: None of the platforms can be used, or the machine has fewer devices than `count`.
    """
    machine = probe or ThisMachine()
    order = ORDER if device == "auto" else (device,) if isinstance(device, str) else device
    if not order or set(order) - set(ORDER):
        raise UserError(
            "E-HARDWARE-002",
            f"device: {device!r} is not a device",
            why="known: auto, tpu, gpu, cpu, or a list of them",
            fix="device: auto",
        )
    missing: dict[str, Absence] = {}
    for platform in order:
        found = _find_devices(machine, platform)
        if not isinstance(found, Absence):
            return _chosen(device, platform, found, count, missing)
        missing[platform] = found
    raise _absent(order, missing)


def _find_devices(machine: Probe, platform: str) -> tuple[Any, ...] | Absence:
    """Return the devices of a platform, or the reason why it cannot be used."""
    ruled_out = machine.absence(platform)
    if ruled_out:
        return ruled_out
    try:
        return machine.devices(platform)
    except RuntimeError as error:
        return _opening_failure(platform, str(error) or type(error).__name__)


def _opening_failure(platform: str, text: str) -> Absence:
    """Return why jax could not open a platform, from its message."""
    attached = platform != "cpu"
    cause = gpu_cause(text) if platform == "gpu" else None
    last = text.strip().splitlines()[-1 if cause else 0]  # the last line of a plugin's error names the library
    why = f"jax could not open it: {last}"
    if cause:
        return Absence(f"{why}\n{cause.why}", cause.fix, attached)
    if re.search(r"already in use|lockfile|multi-process lock", text):
        return Absence(why, "end the other process that uses the TPU; `forerun doctor` names it", attached)
    fix = (
        f"`forerun doctor` looks for the cause (another process on the {_LABELS[platform]}, versions that do not match)"
    )
    return Absence(why, fix, attached)


def _chosen(
    device: str | tuple[str, ...],
    platform: str,
    found: tuple[Any, ...],
    count: int | None,
    missing: Mapping[str, Absence],
) -> DeviceChoice:
    """Return the first `count` of the found devices with the reason; raise an error if there are fewer."""
    if count is not None and count > len(found):
        virtual = f"; for virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        raise UserError(
            "E-HARDWARE-003",
            f"devices: {count} is more than the {_counted(platform, len(found))} here",
            why=f"jax shows {_counted(platform, len(found))}",
            fix=f"devices={len(found)}, or leave devices out" + (virtual if platform == "cpu" else ""),
        )
    used = found[:count]
    size = f"{len(used)} device{'s' if len(used) != 1 else ''}"
    if len(used) < len(found):
        size = f"{len(used)} of {len(found)} devices"
    absent = ", ".join(f"no {_LABELS[name]} ({absence.why})" for name, absence in missing.items())
    if device == "auto":
        reason = f"auto: {absent}, so {platform} with {size}" if missing else f"auto: {platform} with {size}"
    else:
        reason = f"{platform} with {size}, as the job says" + (f"; {absent}" if missing else "")
    return DeviceChoice(platform, used, reason, _warning(device, platform, missing))


def _warning(device: str | tuple[str, ...], platform: str, missing: Mapping[str, Absence]) -> str | None:
    """Return a warning if a preferred platform was skipped. With `auto`, only attached hardware counts."""
    relevant = {name: absence for name, absence in missing.items() if device != "auto" or absence.attached}
    if not relevant:
        return None
    causes = "; ".join(f"{_LABELS[name]}: {absence.why}" for name, absence in relevant.items())
    if device == "auto":
        first = next(iter(relevant))
        return f"a {_LABELS[first]} is attached but not used ({causes}); running on {platform}. {relevant[first].fix}"
    return f"falling back to {platform} ({causes})"


def _absent(order: tuple[str, ...], missing: Mapping[str, Absence]) -> UserError:
    names = " or ".join(f"a {_LABELS[name]}" for name in order)
    whys = "\n".join(f"{_LABELS[name]}: {missing[name].why}" for name in order)
    fixes = dict.fromkeys(missing[name].fix for name in order)
    lost = "this machine has none" if not any(missing[name].attached for name in order) else "it cannot be used here"
    kind, example = ("TPU", "v5e-8") if "tpu" in order else ("GPU", "h100-1")
    return UserError(
        "E-HARDWARE-004",
        f"the job asks for {names}, and {lost}",
        why=whys,
        fix="\n".join([*fixes, f"to check whether it fits a {kind} (needs none): forerun plan JOB --on {example}"]),
    )


@contextmanager
def _plugin_errors() -> Iterator[list[str]]:
    """Collect the errors of jax's plugins inside the block. jax only logs them, with a traceback, and continues."""
    errors: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info is None or record.exc_info[1] is None:
            return True
        errors.append(f"{record.getMessage()}: {record.exc_info[1]}")
        return False

    logger = logging.getLogger("jax._src.xla_bridge")
    logger.addFilter(keep)
    try:
        yield errors
    finally:
        logger.removeFilter(keep)


def _counted(platform: str, count: int) -> str:
    return f"{count} {_LABELS[platform]} device{'s' if count != 1 else ''}"


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True)
class ThisMachine:
    """This machine. Tests can replace `root`, `environment` and `installed`."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    installed: Callable[[str], bool] = _installed

    def absence(self, platform: str) -> Absence | None:
        """Return why the platform cannot be used, from JAX_PLATFORMS, installed packages and device files."""
        allowed = self._allowed()
        if allowed and not {platform, *({"cuda", "rocm"} if platform == "gpu" else ())} & set(allowed):
            setting = self.environment["JAX_PLATFORMS"]
            return Absence(f"JAX_PLATFORMS={setting} excludes it", "unset JAX_PLATFORMS", self._attached(platform))
        if platform == "tpu" and not self.installed("libtpu"):
            return Absence("libtpu is not installed", install_command("tpu"), self._attached(platform))
        if platform == "gpu" and not any(map(self.installed, (*_CUDA_PLUGINS, *_ROCM_PLUGINS))):
            why = "jax's GPU plugin is not installed"
            return Absence(why, install_command("cuda"), self._attached(platform))
        if platform != "cpu" and not self._attached(platform):
            return Absence(
                "none is attached to this machine", f"run on a machine with a {_LABELS[platform]}, or device=auto"
            )
        return None

    def devices(self, platform: str) -> tuple[Any, ...]:
        """Return the platform's jax devices, without opening other accelerators."""
        import jax

        if not self._allowed():
            # Open only the chosen platform: `device: cpu` on a TPU machine must not lock the TPU, and a machine
            # without a TPU must not print libtpu's errors. This has no effect if a backend is already open.
            name = ("cuda" if any(map(self.installed, _CUDA_PLUGINS)) else "rocm") if platform == "gpu" else platform
            jax.config.update("jax_platforms", "cpu" if platform == "cpu" else f"{name},cpu")
        if platform == "gpu":
            reserve_memory_share(os.environ)  # the share that `plan` compares with; jax reads it when it opens the GPU
        with _plugin_errors() as errors:
            try:
                return tuple(jax.devices(platform))
            except (RuntimeError, AssertionError) as error:  # the assertion: JAX_PLATFORMS names only a failed plugin
                raise RuntimeError("\n".join([str(error), *errors]).strip()) from error

    def attached_tpu(self) -> str | None:
        """Return the device file or PCI card that shows that a TPU is attached, or None."""
        for file in sorted((self.root / "dev").glob("accel[0-9]*")):
            return f"/dev/{file.name}"
        for vendor in sorted((self.root / "sys/bus/pci/devices").glob("*/vendor")):
            if vendor.read_text("utf-8").strip() == _GOOGLE:
                identity = (vendor.parent / "device").read_text("utf-8").strip()
                if identity in _TPU_PCI_IDS:
                    return f"PCI card {vendor.parent.name}"
        groups = sorted((self.root / "dev/vfio").glob("[0-9]*"))
        hint = next((name for name in _TPU_HINTS if self.environment.get(name)), None)
        return f"/dev/vfio/{groups[0].name} and {hint}" if groups and hint else None

    def attached_gpu(self) -> str | None:
        """Return the device file that shows that a GPU is attached, or None."""
        return next((f"/{file}" for file in _GPU_FILES if (self.root / file).exists()), None)

    def _attached(self, platform: str) -> bool:
        return bool(self.attached_tpu() if platform == "tpu" else self.attached_gpu() if platform == "gpu" else True)

    def _allowed(self) -> tuple[str, ...]:
        """Return the platforms in JAX_PLATFORMS; empty if it is not set."""
        return tuple(name.strip() for name in self.environment.get("JAX_PLATFORMS", "").split(",") if name.strip())


@dataclass(frozen=True)
class NamedDevice:
    """A device of which only the name is known."""

    device_kind: str


@dataclass(frozen=True)
class CpuWithoutJax(ThisMachine):
    """This machine, whose CPU is one device as long as no setting of jax or XLA can change that."""

    def devices(self, platform: str) -> tuple[Any, ...]:
        """Return the platform's devices. Imports jax except for a CPU with default settings."""
        settings = {name for name in self.environment if name.startswith("JAX_")} - {"JAX_PLATFORMS"}
        if platform != "cpu" or settings or self.environment.get("XLA_FLAGS") or "jax" in sys.modules:
            return super().devices(platform)
        return (NamedDevice("cpu"),)
