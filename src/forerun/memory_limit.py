"""Memory limits of a process, and the errors that occur when they are reached."""

from __future__ import annotations

import errno
import resource

from forerun.errors import UserError
from forerun.units import Bytes

_TEXTS = ("can't start new thread", "failed to map segment", "cannot allocate memory", "std::bad_alloc")


def address_space_bytes() -> int | None:
    """Return the limit of this process's address space (`ulimit -v`), or None if it has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def require_address_space(needed_bytes: int, purpose: str) -> None:
    """Raise an error if the limit of the address space is too low for `purpose`.

    jax and libtpu end the process if they cannot allocate memory or start a thread, so a later check is impossible.

    Raises:
        UserError: The limit is below `needed_bytes`.
    """
    limit_bytes = address_space_bytes()
    if limit_bytes is None or limit_bytes >= needed_bytes:
        return
    raise UserError(
        "E-SYSTEM-005",
        f"the memory limit is too low for {purpose}",
        why=f"the address space is limited to {Bytes(limit_bytes)}, and at least {Bytes(needed_bytes)} is needed",
        fix="ulimit -v unlimited, then the same command; a batch system or a service manager may set the limit",
    )


def out_of_memory(error: BaseException) -> UserError | None:
    """Return the error to show if `error` or one of its causes means that memory ran out, else None."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        if _means_no_memory(current):
            return _short_of_memory(current)
        seen.append(current)
        current = current.__cause__ or current.__context__
    return None


def _means_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    # jax raises RuntimeError, and the dynamic linker's message arrives as ImportError or OSError.
    if not isinstance(error, RuntimeError | ImportError | OSError):
        return False
    message = str(error).lower()
    return any(text in message for text in _TEXTS)


def _short_of_memory(error: BaseException) -> UserError:
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    limit_bytes = address_space_bytes()
    if limit_bytes is None:
        limit, fix = "the address space has no limit", "end other processes, or use a machine with more memory"
    else:
        limit, fix = f"the address space is limited to {Bytes(limit_bytes)}", "ulimit -v unlimited"
    threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if "thread" in said and threads != resource.RLIM_INFINITY:
        limit += f", and the user to {threads} threads (ulimit -u)"
    return UserError("E-SYSTEM-006", "memory ran out", why=f"{said}\n{limit}", fix=f"{fix}, then the same command")
