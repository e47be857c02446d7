"""Which devices a job runs on, and why those. Asks jax only for what a cheap look at the machine has not ruled out."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forerun.errors import UserError
from forerun.installation import install_command

ORDER = ("tpu", "gpu", "cpu")
_SPOKEN = {"tpu": "TPU", "gpu": "GPU", "cpu": "CPU"}
_TPU_HINTS = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_NAME")
_GOOGLE = "0x1ae0"
# PCI ids of v2/v3, v4, v5p, v5e, v6e, tpu7x; Google's network card has the same vendor.
_TPU_PCI_IDS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
_GPU_FILES = ("dev/nvidia0", "dev/nvidiactl", "dev/dxg", "dev/kfd")
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_ROCM_PLUGINS = ("jax_rocm60_plugin", "jax_rocm7_plugin")


@dataclass(frozen=True)
class Chosen:
    """The devices of a run. `reason` is always told to the user, `warning` loudly."""

    platform: str
    devices: tuple[Any, ...]
    reason: str
    warning: str | None = None


@dataclass(frozen=True)
class Absence:
    """Why a platform cannot be used, and what would change that. `attached`: its hardware is here all the same."""

    why: str
    fix: str
    attached: bool = False


class Probe(Protocol):
    """What `choose` asks of a machine."""

    def absence(self, platform: str) -> Absence | None:
        """Why the platform cannot be here, found without loading its runtime; None if it may be here."""

    def devices(self, platform: str) -> tuple[Any, ...]:
        """The platform's devices as jax shows them; RuntimeError if there are none."""


def choose(device: str | tuple[str, ...], count: int | None, probe: Probe | None = None) -> Chosen:
    """The devices for `device:` and `devices:` of a job.

    `auto` takes TPU, then GPU, then CPU. A tuple is tried in its order, with a warning if the first is not taken. An
    explicit device that is not here is an error.
    """
    machine = probe or ThisMachine()
    order = ORDER if device == "auto" else (device,) if isinstance(device, str) else device
    if not order or set(order) - set(ORDER):
        raise UserError(
            f"device: {device!r} is not a device",
            why="known: auto, tpu, gpu, cpu, or a list of them",
            fix="device: auto",
        )
    missing: dict[str, Absence] = {}
    for platform in order:
        found = _look(machine, platform)
        if not isinstance(found, Absence):
            return _chosen(device, platform, found, count, missing)
        missing[platform] = found
    raise _absent(order, missing)


def _look(machine: Probe, platform: str) -> tuple[Any, ...] | Absence:
    ruled_out = machine.absence(platform)
    if ruled_out:
        return ruled_out
    try:
        return machine.devices(platform)
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        why = f"jax could not open it: {lines[0] if lines else type(error).__name__}"
        return Absence(why, _opening_fix(str(error)), attached=platform != "cpu")


def _opening_fix(text: str) -> str:
    if re.search(r"already in use|lockfile|multi-process lock", text):
        return "end the other process that uses the TPU; `forerun doctor` names it"
    return "`forerun doctor` looks for the cause (another process on the TPU, versions that do not fit)"


def _chosen(
    device: str | tuple[str, ...],
    platform: str,
    found: tuple[Any, ...],
    count: int | None,
    missing: Mapping[str, Absence],
) -> Chosen:
    if count is not None and count > len(found):
        virtual = f"; virtual ones: XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        raise UserError(
            f"devices: {count} is more than the {_counted(platform, len(found))} here",
            why=f"jax shows {_counted(platform, len(found))}",
            fix=f"devices={len(found)}, or leave devices out" + (virtual if platform == "cpu" else ""),
        )
    used = found[:count]
    size = f"{len(used)} device{'s' if len(used) != 1 else ''}"
    if len(used) < len(found):
        size = f"{len(used)} of {len(found)} devices"
    absent = ", ".join(f"no {_SPOKEN[name]} ({absence.why})" for name, absence in missing.items())
    if device == "auto":
        reason = f"auto: {absent}, so {platform} with {size}" if missing else f"auto: {platform} with {size}"
    else:
        reason = f"{platform} with {size}, as the job says" + (f"; {absent}" if missing else "")
    return Chosen(platform, used, reason, _warning(device, platform, missing))


def _warning(device: str | tuple[str, ...], platform: str, missing: Mapping[str, Absence]) -> str | None:
    told = {name: absence for name, absence in missing.items() if device != "auto" or absence.attached}
    if not told:
        return None
    causes = "; ".join(f"{_SPOKEN[name]}: {absence.why}" for name, absence in told.items())
    if device == "auto":
        first = next(iter(told))
        return f"a {_SPOKEN[first]} is attached but not used ({causes}); running on {platform}. {told[first].fix}"
    return f"falling back to {platform} ({causes})"


def _absent(order: tuple[str, ...], missing: Mapping[str, Absence]) -> UserError:
    names = " or ".join(f"a {_SPOKEN[name]}" for name in order)
    whys = "\n".join(f"{_SPOKEN[name]}: {missing[name].why}" for name in order)
    fixes = dict.fromkeys(missing[name].fix for name in order)
    lost = "this machine has none" if not any(missing[name].attached for name in order) else "it cannot be used here"
    fixes["does it fit a TPU? forerun plan JOB --on v5e-8 needs none"] = None
    return UserError(f"the job asks for {names}, and {lost}", why=whys, fix="\n".join(fixes))


def _counted(platform: str, count: int) -> str:
    return f"{count} {_SPOKEN[platform]} device{'s' if count != 1 else ''}"


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True)
class ThisMachine:
    """The machine we run on. `root`, `environment` and `installed` can be others in tests."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    installed: Callable[[str], bool] = _installed

    def absence(self, platform: str) -> Absence | None:
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
                "none is attached to this machine", f"run on a machine with a {_SPOKEN[platform]}, or device=auto"
            )
        return None

    def devices(self, platform: str) -> tuple[Any, ...]:
        import jax

        if not self._allowed():
            # Only what was chosen is opened: `device: cpu` on a TPU machine must not take the TPU, and a machine
            # without one must not show libtpu's complaints. No effect if a backend is open already.
            name = ("cuda" if any(map(self.installed, _CUDA_PLUGINS)) else "rocm") if platform == "gpu" else platform
            jax.config.update("jax_platforms", "cpu" if platform == "cpu" else f"{name},cpu")
        return tuple(jax.devices(platform))

    def attached_tpu(self) -> str | None:
        """What shows that a TPU is attached (a device file or a PCI card), or None."""
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
        return next((f"/{file}" for file in _GPU_FILES if (self.root / file).exists()), None)

    def _attached(self, platform: str) -> bool:
        return bool(self.attached_tpu() if platform == "tpu" else self.attached_gpu() if platform == "gpu" else True)

    def _allowed(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.environment.get("JAX_PLATFORMS", "").split(",") if name.strip())
