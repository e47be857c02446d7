"""The checks of `forerun doctor`: the environment, the installed packages, and the TPUs of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from typing import Any

from forerun.doctor.machine import Finding, Machine
from forerun.errors import UserError
from forerun.exit_codes import USER_MISTAKE
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.slices import slice_named
from forerun.hardware.tpu_hosts import EVERYWHERE, find_tpu_hosts
from forerun.installation import install_command
from forerun.planner.compile.installed_compilers import PLUGINS, plugin_problem
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
NAME_WIDTH = 14
SYMPTOMS_PAGE = "docs/reference/doctor.md#symptoms"
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


OLDEST_PYTHON = (3, 11)
NEEDED = ("optax", "orbax-checkpoint", "numpy")


# ---- Installed packages: whether they exist and their versions match ----


def check_python(machine: Machine) -> Finding:
    """Fail if Python is too old."""
    text = ".".join(map(str, machine.python))
    if machine.python[:2] < OLDEST_PYTHON:
        return Finding("python", "FAIL", f"{text}; forerun needs 3.11 or newer", "install Python 3.11 or newer")
    return Finding("python", "ok", text)


def check_jax(machine: Machine) -> Finding:
    """Fail if jax or jaxlib is missing, or if their versions differ."""
    jax, jaxlib = machine.versions.get("jax"), machine.versions.get("jaxlib")
    if not jax or not jaxlib:
        missing = "jax" if not jax else "jaxlib"
        return Finding("jax", "FAIL", f"{missing} is not installed", install_command())
    if jax != jaxlib:
        fix = f"pip install 'jax=={jax}' 'jaxlib=={jax}'"
        return Finding("jax", "FAIL", f"jax {jax} next to jaxlib {jaxlib}: they are released together", fix)
    return Finding("jax", "ok", f"jax and jaxlib {jax}")


def check_libtpu(machine: Machine) -> Finding:
    """Check libtpu, which is both compiler and runtime. Only the version that this jax pins is known to work."""
    found, pin = machine.versions.get("libtpu"), libtpu_pin(machine.jax_requires)
    if machine.versions.get("libtpu-nightly"):
        return Finding(
            "libtpu",
            "FAIL",
            "libtpu-nightly is installed: it writes the same files as libtpu",
            f"pip uninstall -y libtpu-nightly libtpu && {install_command('tpu')}",
        )
    if not found and machine.attached_tpu:
        why = f"not installed, and a TPU is attached ({machine.attached_tpu})"
        return Finding("libtpu", "FAIL", why, install_command("tpu"))
    if not found:
        return Finding("libtpu", "warn", "not installed: `forerun plan` cannot compile", install_command("plan"))
    if pin and not fnmatch(found, pin):
        why = f"{found}, but jax {machine.versions.get('jax')} pins {pin}; other versions cannot load its programs"
        return Finding("libtpu", "FAIL", why, f"pip install 'libtpu=={pin}'")
    return Finding("libtpu", "ok", f"{found}" + (f", as jax pins it ({pin})" if pin else ""))


def check_gpu_compiler(machine: Machine) -> Finding:
    """Check jax's CUDA plugins, which contain the GPU compiler: installed, of jax's release, and able to compile."""
    name = "gpu compiler"
    found = next(((plugin, machine.versions[plugin]) for plugin, _ in PLUGINS if machine.versions.get(plugin)), None)
    if found is None:
        why = "not installed: `forerun plan` cannot compile for GPUs (it needs no GPU)"
        return Finding(name, "warn", why, install_command("plan-gpu"))
    if problem := plugin_problem(machine.versions, machine.jax_requires):
        return Finding(name, "FAIL", f"{problem}: they are released together", install_command("plan-gpu"))
    if failure := machine.gpu_compiler_failure():
        fix = f"pip uninstall -y {found[0]} && {install_command('plan-gpu')}"
        return Finding(name, "FAIL", f"{found[0]} {found[1]} cannot compile a tiny program: {failure}", fix)
    return Finding(name, "ok", f"{found[0]} {found[1]}, which compiles for GPUs without one")


def libtpu_pin(jax_requires: tuple[str, ...]) -> str | None:
    """Return the libtpu version pattern of jax's `tpu` extra, such as `0.0.42.*`, or None."""
    for line in jax_requires:
        found = re.match(r"libtpu\s*==\s*([\w.*]+)\s*;.*extra\s*==\s*['\"]tpu['\"]", line)
        if found:
            return found[1]
    return None


def check_libraries(machine: Machine) -> Finding:
    """Fail if a required library is missing."""
    missing = [name for name in NEEDED if not machine.versions.get(name)]
    if missing:
        return Finding("libraries", "FAIL", f"{', '.join(missing)} not installed", install_command())
    return Finding("libraries", "ok", ", ".join(f"{name} {machine.versions[name]}" for name in NEEDED))


def check_torch_xla(machine: Machine) -> Finding:
    """Warn if torch_xla is installed, because it can lock the TPU."""
    found = machine.versions.get("torch-xla")
    if not found:
        return Finding("torch_xla", "ok", "not installed")
    why = f"{found} is installed: it has its own libtpu and can lock the TPU; its last release is 2.9.0"
    return Finding("torch_xla", "warn", why, "pip uninstall -y torch_xla (forerun does not need it)")


HINTS = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_NAME", "TPU_WORKER_HOSTNAMES")
LIMITS = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")


# ---- TPUs: devices, lock file, hosts ----


def check_devices(machine: Machine) -> Finding:
    """Report the devices that a job with `device: auto` would run on."""
    seen = machine.sight()
    if seen.error:
        fix = "see the other lines; on one of several TPU hosts jax waits for the others"
        return Finding("devices", "FAIL", seen.error, fix)
    text = f"{seen.devices} x {seen.kind or seen.platform}; {seen.reason}"
    return Finding("devices", "ok", text)


def check_tpu_seen(machine: Machine) -> Finding:
    """Fail if a TPU is attached but jax does not use it. Warn if the environment names a TPU but none is attached."""
    seen = machine.sight()
    if seen.platform == "tpu":
        return Finding("tpu", "ok", "attached and in use")
    if machine.attached_tpu:
        found = f"attached ({machine.attached_tpu}), but jax shows {seen.platform or 'nothing'}"
        return Finding("tpu", "FAIL", f"{found}: {seen.warning or seen.error or seen.reason}", _unseen_fix(machine))
    hint = next((name for name in HINTS if machine.environment.get(name)), None)
    if hint:
        found = f"{hint}={machine.environment[hint]} indicates a TPU machine, but it has no TPU device file"
        return Finding("tpu", "warn", found, "in a container: docker run --privileged --net=host, or pass /dev/vfio")
    return Finding("tpu", "ok", "none attached; `forerun plan` needs none")


def _unseen_fix(machine: Machine) -> str:
    """Return the fix for an attached TPU that jax does not use."""
    platforms = machine.environment.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms:
        return "unset JAX_PLATFORMS"
    if not machine.versions.get("libtpu"):
        return install_command("tpu")
    if machine.lock and machine.lock.holders:
        return f"kill {machine.lock.holders[0].pid}, which holds the TPU, or wait for it"
    return "restart the machine's TPU runtime or the notebook, then run this again"


def check_device_count(machine: Machine) -> Finding:
    """Compare the number of devices with the name of the slice: v6e-1 has one device, v4-8 has four."""
    seen = machine.sight()
    chip = chip_of_device_kind(seen.kind)
    if seen.platform != "tpu" or chip is None:
        return Finding("device count", "ok", "no TPU to count")
    named = machine.environment.get("TPU_ACCELERATOR_TYPE", "")
    limit = next((name for name in LIMITS if machine.environment.get(name)), None)
    try:
        expected = slice_named(named).devices if named else None
    except UserError:
        expected = None
    if expected is None:
        per = "two devices" if chip.devices_per_chip == 2 else "one device"
        return Finding("device count", "ok", f"{seen.devices} on {chip.name}: a {chip.name} chip shows {per}")
    if seen.devices == expected:
        return Finding("device count", "ok", f"{seen.devices}, which matches {named}")
    found = f"{seen.devices} of the {expected} devices of {named}"
    if limit:
        return Finding("device count", "warn", f"{found}: {limit} limits them", f"unset {limit}")
    return Finding("device count", "FAIL", found, "another process may hold the rest: see the lock line; else restart")


def check_lock(machine: Machine) -> Finding:
    """Fail if another process holds libtpu's lock file. Warn if a dead process left it."""
    lock = machine.lock
    if lock is None:
        return Finding("libtpu lock", "ok", "free")
    if not lock.holders:
        fix = f"{'' if lock.mine else 'sudo '}rm {lock.path}"
        return Finding("libtpu lock", "warn", f"{lock.path} was left by a process that has ended", fix)
    holder = lock.holders[0]
    more = f" and {len(lock.holders) - 1} more" if len(lock.holders) > 1 else ""
    found = f"held by process {holder.pid} ({holder.command}){more}: only one process at a time can use the TPU"
    return Finding("libtpu lock", "FAIL", found, f"kill {holder.pid}, or wait for it; do not remove the file")


def check_hosts(machine: Machine) -> Finding:
    """Warn if this is one of several hosts: a program that runs on only one of them waits for the others."""
    try:
        hosts = find_tpu_hosts(machine.environment, machine.metadata)
    except UserError as error:
        return Finding("hosts", "warn", f"{error.what}; {error.why}", error.fix)
    if hosts is None or hosts.count < 2:
        return Finding("hosts", "ok", "one")
    found = f"this is host {hosts.number} of {hosts.count}: a job started on one host alone waits forever"
    fix = f"copy the job, its data and the secret to all hosts, then: {EVERYWHERE} (docs/how-to/hosts.md)"
    return Finding("hosts", "warn", found, fix)


# ---- All checks, in the order in which they are printed ----

CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_python,
    check_jax,
    check_libtpu,
    check_gpu_compiler,
    check_libraries,
    check_torch_xla,
    check_devices,
    check_tpu_seen,
    check_device_count,
    check_lock,
    check_hosts,
    check_platforms,
    check_torch_xla_variables,
    check_debug_variables,
    check_xla_flags,
    check_preload,
    check_disk,
    check_cache,
    check_bytecode,
    check_memory,
    check_shm,
)


def run(smoke: bool, machine: Machine | None = None, overrides: Sequence[str] = ()) -> int:
    """Run all checks and print their findings.

    Args:
        smoke: Also train for about a minute on this machine's devices.
        machine: The machine to check; this one by default.
        overrides: Changes of the job of `smoke`, such as `device=tpu`.

    Returns:
        The exit code: 0 if nothing failed, else 2.

    Raises:
        UserError: An override is malformed, or is given without `smoke`.
    """
    values = _smoke_values(smoke, overrides)
    here = machine or Machine.here()
    findings = []
    for check in CHECKS:
        findings.append(check(here))
        print(line(findings[-1]), flush=True)
    print(verdict(findings))
    print(f"symptoms and their fixes: {SYMPTOMS_PAGE}")
    code = USER_MISTAKE if any(finding.status == "FAIL" for finding in findings) else 0
    if not smoke:
        return code

    from forerun.doctor import smoke as trial

    return max(code, trial.run(values))


def _smoke_values(smoke: bool, overrides: Sequence[str]) -> dict[str, Any]:
    if not overrides:
        return {}
    if not smoke:
        raise UserError(
            "E-COMMAND-060",
            f"'{overrides[0]}' needs --smoke",
            why="without it, forerun doctor trains nothing, so there is no job to change",
            fix=f"forerun doctor --smoke {' '.join(overrides)}"
            if "=" in overrides[0]
            else "see: forerun doctor --help",
        )
    from forerun.doctor.smoke import values_of

    return values_of(overrides)


def line(finding: Finding) -> str:
    """Return a line such as `ok    disk            52 GiB free`, with the fix on a second line."""
    first = f"{finding.status:4}  {finding.name:{NAME_WIDTH}}  {finding.found}"
    return f"{first}\n{'':6}{'fix:':{NAME_WIDTH}}  {finding.fix}" if finding.fix else first


def verdict(findings: Iterable[Finding]) -> str:
    """Return a summary: how many checks failed and how many warn."""
    states = [finding.status for finding in findings]
    failed, warned = states.count("FAIL"), states.count("warn")
    if not failed and not warned:
        return f"{len(states)} checks, all passed"
    return f"{len(states)} checks: {failed} failed, {warned} with warnings"
