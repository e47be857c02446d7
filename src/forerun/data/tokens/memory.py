"""A limit on the memory for tokenizing a batch of texts.

A tokenizer.json may be hostile: its normalizer may replace every "e" by a thousand characters. The kernel enforces the
limit. RLIMIT_DATA counts the memory that a process allocates; RLIMIT_AS would also count mapped data files.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.errors import UserError
from forerun.units import GIB, Bytes

BASE_BYTES = GIB
BYTES_PER_CHARACTER = 1024  # about 220 are needed if every byte is a token and spans are computed
LIMIT = f"{Bytes(BASE_BYTES)} and {Bytes(BYTES_PER_CHARACTER)} for each character"

_ABORTED = "memory allocation of"  # printed by Rust when it aborts a process after a failed allocation


@contextmanager
def limited_memory(characters: int) -> Iterator[None]:
    """Limit the memory that the block may allocate to `BASE_BYTES` plus `BYTES_PER_CHARACTER` per character.

    An allocation beyond the limit aborts the process if it is in Rust code, and raises MemoryError in Python.
    """
    used = _data_bytes()
    if used is None:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = used + BASE_BYTES + BYTES_PER_CHARACTER * characters
    ceilings = [limit for limit in (before, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([allowed, *ceilings]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def is_exhausted(code: int, said: str) -> bool:
    """Return whether a process with this exit code and output on stderr ended because an allocation failed."""
    return code == -signal.SIGABRT and _ABORTED in said


def no_memory(what: str) -> UserError:
    """Return the error for a tokenizer that reached its memory limit while it tokenized `what`."""
    return UserError(
        "E-DATA-099",
        f"the tokenizer needs too much memory for {what}",
        why=f"one batch of texts may take {LIMIT}, if the system has that much memory",
        fix="check that the tokenizer.json comes from the model's publisher, or split very long documents",
    )


def _data_bytes() -> int | None:
    """Return the bytes of this process that RLIMIT_DATA counts, or None without /proc (for example on macOS)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return None
