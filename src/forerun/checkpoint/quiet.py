"""Libraries tell their errors as exceptions; their logs (hundreds of lines for one full disk) are not for the user."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# What a save that failed leaves behind of Orbax: coroutines that were not begun.
_LEFT = (
    "coroutine '(_create_paths|cancellable|_?(async_)?serialize|BasePyTree|_write_metadata|"
    ".*_serialize_without_dispatcher).*was never awaited"
)


def quiet_orbax() -> None:
    """Also of writes that end after their save has failed: they find its event loop closed, or never began."""
    logging.getLogger("absl").addFilter(_not_from_orbax)
    warnings.filterwarnings("ignore", _LEFT, RuntimeWarning)
    told: Any = sys.unraisablehook
    if getattr(told, "func", None) is not _told_unless_late:
        sys.unraisablehook = partial(_told_unless_late, told)


def quiet_bucket() -> None:
    """gcsfs logs a traceback for each request that it gives up."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", _LEFT, RuntimeWarning)


def forget(response: Any) -> None:
    """Of a save that failed before it wrote: what Orbax did not come to do would be told as "never awaited"."""
    rest = getattr(response, "_background_awaitable", None)
    with suppress(RuntimeError, ValueError):  # it ran, or runs
        if inspect.iscoroutine(rest):
            rest.close()


def release() -> None:
    """After a save that failed, when no other is under way: threads of Orbax may wait for its folders for 5 minutes,
    and the end of the process for these threads. For one host, whose signals nobody else hears."""
    with suppress(Exception):  # parts of Orbax that it may rename: then the end of the process is late, no more
        from orbax.checkpoint._src.futures.future import set_signals

        for thread in threading.enumerate():
            if type(thread).__name__ == "_SignalingThread":
                waiting: Any = thread
                waiting.cancel()
                set_signals(waiting._receive_signals, operation_id=waiting._operation_id)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in Path(record.pathname).parts or record.levelno >= logging.CRITICAL


def _told_unless_late(told: Callable[[Any], object], unraisable: Any) -> None:
    """The hook for exceptions that nobody can catch."""
    text = str(unraisable.exc_value)
    late = unraisable.object is None and text == "Event loop is closed"
    unbegun = isinstance(unraisable.exc_value, RuntimeWarning) and re.match(_LEFT, text)
    if not late and not unbegun:
        told(unraisable)
