"""Checks of TPUs: devices, lock file, hosts."""

from __future__ import annotations

from forerun.doctor.machine import Finding, Machine
from forerun.errors import UserError
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.slices import slice_named
from forerun.hardware.tpu_hosts import EVERYWHERE, find_tpu_hosts
from forerun.installation import install_command

HINTS = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_NAME", "TPU_WORKER_HOSTNAMES")
LIMITS = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")


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
