"""A save that is interrupted while Orbax starts it must not delay the end of the process."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from forerun.checkpoint.store import CheckpointStore

STATE = {"x": jnp.ones((8, 8))}
PATIENCE_SECONDS = 60  # Orbax's threads wait for 300


def waiting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if type(thread).__name__ == "_SignalingThread"]


def inside_threading(frame: Any) -> bool:
    """Return whether a function of `threading` is running, such as the start of a thread, whose locks are held."""
    while frame is not None and frame.f_code.co_filename != threading.__file__:
        frame = frame.f_back
    return frame is not None


class Interrupting:
    """A profiling function that raises at the first call in this thread after Orbax has started a thread of its own."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.raised = error, False

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call" and not inside_threading(frame) and waiting():
            sys.setprofile(None)
            self.raised = True
            raise self.error("interrupted")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_thread_of_orbax_keeps_waiting(tmp_path: Path, error: type[BaseException]) -> None:
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(1, STATE, {})
        store.wait()
        assert not waiting()
        interrupting = Interrupting(error)
        before = sys.getprofile()
        sys.setprofile(interrupting)
        try:
            with pytest.raises(error):
                store.save(2, STATE, {})
        finally:
            sys.setprofile(before)
        assert interrupting.raised
        end = time.monotonic() + PATIENCE_SECONDS
        while waiting() and time.monotonic() < end:
            time.sleep(0.01)
        assert not waiting()
        assert store.steps() == [1]
        store.save(3, STATE, {})
        store.wait()
        assert store.steps() == [1, 3]
