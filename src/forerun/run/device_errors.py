"""Errors of the devices during a run, from the messages of jax: memory that is full, and broken installations of CUDA.

The supervisor does not restart a run after one of these errors, because it would fail again. Other failures of devices,
such as defective memory or a lost connection between nodes, stay exceptions: a restart may help.
"""

from __future__ import annotations

import re

from forerun.errors import UserError
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.gpu_errors import gpu_cause
from forerun.hardware.slices import slices

# XLA:GPU, jax's allocator, CUDA, and libtpu at run time and at compile time, in this order.
_FULL = re.compile(
    r"RESOURCE_EXHAUSTED.*(?:Out of memory|out of memory|Failed to allocate request)"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
    r"|RESOURCE_EXHAUSTED.*(?:Error allocating device buffer|Ran out of memory in memory space)",
    re.DOTALL,
)
_NCCL = re.compile(r"NCCL operation .*? failed: [^\n]*")
_SHOWN_CHARACTERS = 300


def user_error_of(error: BaseException, hosts: int) -> UserError | None:
    """Return the error for the user if `error` comes from a device of this run and has a known cause."""
    import jax

    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None  # before the devices are open, asking for them would open them
    devices = jax.devices()
    return device_error(error, devices[0].device_kind, len(devices), hosts)


def device_error(error: BaseException, kind: str, devices: int, hosts: int) -> UserError | None:
    """Return the error for the user if an exception of jax has a cause that the user can correct.

    Args:
        error: The exception.
        kind: JAX's name of the devices, such as "NVIDIA H100 80GB HBM3".
        devices: Number of devices of the run.
        hosts: Number of hosts of the run.
    """
    from jax.errors import JaxRuntimeError

    if not isinstance(error, JaxRuntimeError):
        return None
    text = str(error)
    first_line = text.strip().partition("\n")[0][:_SHOWN_CHARACTERS]
    chip = chip_of_device_kind(kind)
    is_gpu = "NVIDIA" in kind or (chip is not None and chip.gpu is not None)
    if _FULL.search(text):
        machine = _machine(kind, devices, hosts)
        return UserError(
            "E-RUN-088",
            f"the memory of the devices ({kind}) is full",
            why=first_line + ("\nother processes may use the GPU's memory: see nvidia-smi" if is_gpu else ""),
            fix=f"forerun plan JOB --on {machine} shows what fills the memory; reduce micro_batch "
            "or sequence, set remat=full, or increase mesh.fsdp",
        )
    # If a host fails, NCCL fails on the others, and only the supervisors know which host was first. So this is an
    # error for the user on one host only.
    if hosts == 1 and (failed := _NCCL.search(text)) and "Unable to load NCCL" not in text:
        return UserError(
            "E-RUN-089",
            "the GPUs cannot communicate",
            why=failed[0][:_SHOWN_CHARACTERS],
            fix="NCCL_DEBUG=INFO prints the cause; in a container: docker run --shm-size=1g --ulimit memlock=-1; "
            "NCCL_P2P_DISABLE=1 tells whether direct transfers between GPUs are the cause",
        )
    if is_gpu and (cause := gpu_cause(text)) is not None:
        return UserError(
            "E-RUN-090",
            f"{kind} cannot run the program",
            why=f"{first_line}\n{cause.why}",
            fix=f"{cause.fix}; then run the same command again",
        )
    return None


def _machine(kind: str, devices: int, hosts: int) -> str:
    """Return the name of the slice or GPU machines with these devices, or `SLICE` if the tables do not have it."""
    chip = chip_of_device_kind(kind)
    if chip is not None and chip.gpu is not None and devices % hosts == 0:
        return f"{chip.name.lower()}-{devices // hosts}" + (f"x{hosts}" if hosts > 1 else "")
    known = (one for one in slices() if chip is not None and one.chip.name == chip.name)
    return next((one.name for one in known if one.devices == devices), "SLICE")
