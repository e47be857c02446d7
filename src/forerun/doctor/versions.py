"""Checks of the installed packages: whether they exist and their versions match."""

from __future__ import annotations

import re
from fnmatch import fnmatch

from forerun.doctor.machine import Finding, Machine
from forerun.installation import install_command
from forerun.planner.compile.installed_compilers import PLUGINS, plugin_problem

OLDEST_PYTHON = (3, 11)
NEEDED = ("optax", "orbax-checkpoint", "numpy")


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
