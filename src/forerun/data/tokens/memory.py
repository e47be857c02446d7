"""A limit on the memory that tokenizing a batch of texts may take.

A tokenizer.json may be hostile: its normalizer may replace every "e" by a thousand characters. The kernel stops it.
RLIMIT_DATA counts the memory that a process allocates; RLIMIT_AS would also count data files that are mapped.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.errors import UserError
from forerun.units import GIB, Bytes

BASE_BYTES = GIB
BYTES_PER_CHARACTER = 1024  # about 220 are needed when every byte is a token and spans are wanted
LIMIT = f"{Bytes(BASE_BYTES)} and {Bytes(BYTES_PER_CHARACTER)} for each character"

_ABORTED = "memory allocation of"  # how Rust ends a process that gets no memory


@contextmanager
def limited_memory(characters: int) -> Iterator[None]:
    """Allow the block `BASE_BYTES` and `BYTES_PER_CHARACTER` more memory than the process has.

    An allocation beyond that ends the process if the library is written in Rust, and is a MemoryError in Python.
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
    """Return whether a process with this exit code and these last words ended because it got no memory."""
    return code == -signal.SIGABRT and _ABORTED in said


def no_memory(what: str) -> UserError:
    """Return the error for a tokenizer that got no more memory while it tokenized `what`."""
    return UserError(
        f"the tokenizer needs too much memory for {what}",
        why=f"one batch of texts may take {LIMIT}, or what the system has left",
        fix="check that the tokenizer.json comes from the model's publisher, or split very long documents",
    )


def _data_bytes() -> int | None:
    """Return the bytes of the process that RLIMIT_DATA counts; None on systems without /proc, such as macOS."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return None
