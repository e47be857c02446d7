"""Checks of the environment of a run: environment variables, disk, memory."""

from __future__ import annotations

import os

from forerun.doctor.machine import Finding, Machine
from forerun.units import GIB, Bytes

PAGE = "docs/how-to/debugging.md"
# Variables that only torch_xla reads, and what has the same effect here.
TORCH_XLA_VARIABLES = {
    "PJRT_DEVICE": "device=tpu in the job",
    "XRT_TPU_CONFIG": "nothing",
    "XLA_USE_BF16": "precision.compute=bfloat16, the default",
    "PT_XLA_DEBUG": "JAX_LOG_COMPILES=1",
    "XLA_IR_DEBUG": "JAX_DUMP_IR_TO=FOLDER",
    "XLA_HLO_DEBUG": "XLA_FLAGS=--xla_dump_to=FOLDER",
    "TPU_NUM_DEVICES": "devices=N in the job",
}
# Variables of JAX and XLA that print or check more. Those with True also make a run slow.
DEBUG_VARIABLES = {
    "JAX_DEBUG_NANS": True,
    "JAX_DISABLE_JIT": True,
    "JAX_DUMP_IR_TO": False,
    "JAX_EXPLAIN_CACHE_MISSES": False,
    "JAX_LOG_COMPILES": False,
    "JAX_LOGGING_LEVEL": False,
    "JAX_TRACEBACK_FILTERING": False,
    "TF_CPP_MIN_LOG_LEVEL": False,
    "TPU_MIN_LOG_LEVEL": False,
    "TPU_STDERR_LOG_LEVEL": False,
}
OFF = ("0", "false", "no", "off")
HARMLESS_FLAGS = ("--xla_force_host_platform_device_count", "--xla_tpu_use_enhanced_launch_barrier")
DISK_FAIL_BYTES, DISK_WARN_BYTES = 1 * GIB, 20 * GIB
MEMORY_WARN_BYTES = 4 * GIB
SHM_WARN_BYTES = 1 * GIB


def check_platforms(machine: Machine) -> Finding:
    """Fail if JAX_PLATFORMS, which overrides the job's `device`, does not match the hardware."""
    setting = machine.environment.get("JAX_PLATFORMS", "")
    if not setting:
        return Finding("JAX_PLATFORMS", "ok", "not set: the job's `device` decides")
    asks_tpu = "tpu" in setting
    if machine.attached_tpu and not asks_tpu:
        found = f"{setting} hides the TPU that is attached ({machine.attached_tpu})"
        return Finding("JAX_PLATFORMS", "FAIL", found, "unset JAX_PLATFORMS")
    if asks_tpu and not machine.attached_tpu:
        return Finding("JAX_PLATFORMS", "FAIL", f"{setting}, but no TPU is attached", "unset JAX_PLATFORMS")
    return Finding("JAX_PLATFORMS", "ok", f"{setting}: `device` can choose only among these")


def check_torch_xla_variables(machine: Machine) -> Finding:
    """Warn of variables from torch_xla guides. They have no effect on jax and mislead readers."""
    names = [name for name in TORCH_XLA_VARIABLES if machine.environment.get(name)]
    if not names:
        return Finding("old variables", "ok", "no torch_xla variables")
    text = ", ".join(f"{name}={machine.environment[name]}" for name in names)
    instead = ", ".join(f"{TORCH_XLA_VARIABLES[name]} (for {name})" for name in names)
    fix = f"unset {' '.join(names)}; use instead: {instead}; see {PAGE}"
    return Finding("old variables", "warn", f"{text}: only torch_xla reads them", fix)


def check_debug_variables(machine: Machine) -> Finding:
    """Report variables for debugging, and warn of those that make every run slow."""
    names = [name for name in DEBUG_VARIABLES if machine.environment.get(name)]
    if not names:
        return Finding("debugging", "ok", "no variables for debugging")
    text = ", ".join(f"{name}={machine.environment[name]}" for name in names)
    slow = [name for name in names if DEBUG_VARIABLES[name] and machine.environment[name].lower() not in OFF]
    if not slow:
        return Finding("debugging", "ok", f"{text}: see {PAGE}")
    return Finding(
        "debugging", "warn", f"{text}: makes runs slow", f"unset {' '.join(slow)} after debugging; see {PAGE}"
    )


def check_xla_flags(machine: Machine) -> Finding:
    """Warn of the user's XLA flags. They change memory and time, so a plan made without them does not apply."""
    flags = [
        f"{name}: {flag}"
        for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
        for flag in machine.environment.get(name, "").split()
        if flag.split("=")[0] not in HARMLESS_FLAGS
    ]
    if not flags:
        return Finding("XLA flags", "ok", "none that change the program")
    found = f"{'; '.join(flags)}: memory and speed can differ from the plan"
    variables = " ".join(dict.fromkeys(flag.split(":")[0] for flag in flags))
    return Finding("XLA flags", "warn", found, f"unset {variables}, or set it the same for `plan` and `train`")


def check_preload(machine: Machine) -> Finding:
    """Warn if LD_PRELOAD names a library that does not exist."""
    libraries = machine.environment.get("LD_PRELOAD", "").replace(":", " ").split()
    gone = [library for library in libraries if "/" in library and not machine.file_exists(library)]
    if gone:
        return Finding(
            "LD_PRELOAD", "warn", f"{gone[0]} does not exist: every program prints an error", "unset LD_PRELOAD"
        )
    return Finding("LD_PRELOAD", "ok", " ".join(libraries) or "not set")


def check_disk(machine: Machine) -> Finding:
    """Fail or warn if the disk of ./runs has little free space."""
    free = machine.runs_free_bytes
    found = f"{Bytes(free)} free for ./runs"
    needs = "a checkpoint takes 12 bytes per parameter (1B: 12 GB), and two are kept"
    if free < DISK_FAIL_BYTES:
        return Finding("disk", "FAIL", f"{found}; {needs}", "free some, or put runs elsewhere: runs=/path/with/space")
    if free < DISK_WARN_BYTES:
        return Finding("disk", "warn", f"{found}; {needs}", "enough for small models; else runs=/path/with/space")
    return Finding("disk", "ok", found)


def check_cache(machine: Machine) -> Finding:
    """Warn if the compile cache is not writable. Without a cache, every start compiles again."""
    why = machine.unwritable(machine.cache_folder)
    if why:
        fix = "export JAX_COMPILATION_CACHE_DIR=/a/folder/you/may/write"
        return Finding("compile cache", "warn", f"{machine.cache_folder} is not writable ({why})", fix)
    return Finding("compile cache", "ok", f"{machine.cache_folder} is writable")


def check_bytecode(machine: Machine) -> Finding:
    """Warn if Python cannot store bytecode, for example in a container. A start then takes three times as long."""
    name, slow = "bytecode", "every start compiles jax's source again: about three seconds"
    if machine.file_exists(machine.jax_bytecode):
        return Finding(name, "ok", "bytecode is stored")
    if machine.environment.get("PYTHONDONTWRITEBYTECODE"):
        return Finding(name, "warn", f"PYTHONDONTWRITEBYTECODE is set: {slow}", "unset PYTHONDONTWRITEBYTECODE")
    folder = os.path.dirname(machine.jax_bytecode)
    why = machine.unwritable(folder)
    if why:
        fix = "export PYTHONPYCACHEPREFIX=/a/folder/you/may/write"
        return Finding(name, "warn", f"{folder} is not writable ({why}): {slow}", fix)
    return Finding(name, "ok", "bytecode will be stored at the next start")


def check_memory(machine: Machine) -> Finding:
    """Warn if little host memory is available."""
    available = machine.memory_available_bytes
    if available is None:
        return Finding("memory", "ok", "not known on this system")
    if available < MEMORY_WARN_BYTES:
        found = f"{Bytes(available)} available; compiling a model of 1B can take more"
        return Finding("memory", "warn", found, "close other programs, or use a larger machine")
    return Finding("memory", "ok", f"{Bytes(available)} available")


def check_shm(machine: Machine) -> Finding:
    """Warn if /dev/shm is small, as it often is in a container."""
    size = machine.shm_bytes
    if size is None:
        return Finding("/dev/shm", "ok", "does not exist; not needed")
    if size < SHM_WARN_BYTES:
        fix = "in a container: docker run --shm-size=8g"
        return Finding("/dev/shm", "warn", f"{Bytes(size)}: processes that load data share memory through it", fix)
    return Finding("/dev/shm", "ok", str(Bytes(size)))
