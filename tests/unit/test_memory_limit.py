"""Errors of processes that really reach a limit, and errors that only look similar."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from forerun.errors import UserError
from forerun.memory_limit import address_space_bytes, out_of_memory, require_address_space
from forerun.units import GIB, MIB, Bytes

LIMIT_BYTES = 512 * MIB
CHILD = f"""
import mmap, resource, threading
from forerun.memory_limit import address_space_bytes, out_of_memory
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))
assert address_space_bytes() == {LIMIT_BYTES}
def start():
    threading.stack_size({GIB})
    threading.Thread(target=print).start()
def wrapped():
    try:
        bytearray({GIB})
    except MemoryError as error:
        raise ImportError("the extension failed") from error
for call in (lambda: bytearray({GIB}), lambda: mmap.mmap(-1, {GIB}), start, wrapped):
    try:
        call()
    except BaseException as error:
        found = out_of_memory(error)
        print(type(error).__name__, found.exit_code, "{Bytes(LIMIT_BYTES)}" in found.why)
"""


def test_real_errors_at_a_limit_are_recognised() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", CHILD]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    kinds = ["MemoryError", "OSError", "RuntimeError", "ImportError"]
    assert ran.stdout.splitlines() == [f"{kind} 2 True" for kind in kinds]


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libjax_common.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_errors_of_the_dynamic_linker_are_recognised(error: Exception) -> None:
    assert out_of_memory(error) is not None


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named 'torch'"),
        ValueError("can't start new thread"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("shapes differ"),
    ],
)
def test_other_errors_are_not(error: Exception) -> None:
    assert out_of_memory(error) is None


def test_no_limit_is_enough_for_everything() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert address_space_bytes() is None
    require_address_space(1 << 60, "a test")


def test_a_limit_that_is_too_low_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (GIB, GIB))
    require_address_space(GIB, "a test")
    with pytest.raises(UserError) as rejected:
        require_address_space(GIB + 1, "a test")
    assert str(Bytes(GIB)) in rejected.value.why
