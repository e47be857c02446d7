"""Suppression of the logs and leftovers of Orbax.

Their errors are raised as exceptions, which forerun reports. Their logs (hundreds of lines for one full disk) would
hide these reports.
"""

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

# Warnings about coroutines of Orbax that a failed save did not start.
_UNSTARTED_COROUTINE = (
    "coroutine '(_create_paths|cancellable|_?(async_)?serialize|BasePyTree|_write_metadata|"
    ".*_serialize_without_dispatcher).*was never awaited"
)


def quiet_orbax() -> None:
    """Suppress the logs of Orbax, and what its late writes report after their save has failed.

    These writes find the event loop of their save closed, or were never started.
    """
    logging.getLogger("absl").addFilter(_not_from_orbax)
    warnings.filterwarnings("ignore", _UNSTARTED_COROUTINE, RuntimeWarning)
    hook: Any = sys.unraisablehook
    if getattr(hook, "func", None) is not _report_unless_late:
        sys.unraisablehook = partial(_report_unless_late, hook)


def forget(response: Any) -> None:
    """Close the coroutine of a failed save that Orbax did not start. Python would warn that it was never awaited."""
    coroutine = getattr(response, "_background_awaitable", None)
    with suppress(RuntimeError, ValueError):  # the coroutine ran or is running
        if inspect.iscoroutine(coroutine):
            coroutine.close()


def release() -> None:
    """End the threads of Orbax that wait for the folders of a failed save.

    They may wait for 5 minutes, and the process cannot end before them. Call this only on a single host, because the
    signals do not reach other hosts, and only while no other save is under way.
    """
    # These are private parts of Orbax. If a new version renames them, the process only ends later.
    with suppress(Exception):
        from orbax.checkpoint._src.futures.future import set_signals

        for thread in threading.enumerate():
            if type(thread).__name__ == "_SignalingThread":
                waiting: Any = thread
                waiting.cancel()
                set_signals(waiting._receive_signals, operation_id=waiting._operation_id)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in Path(record.pathname).parts or record.levelno >= logging.CRITICAL


def _report_unless_late(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Pass an unraisable exception on to `hook`, unless it comes from a failed save of Orbax."""
    text = str(unraisable.exc_value)
    late = unraisable.object is None and text == "Event loop is closed"
    unbegun = isinstance(unraisable.exc_value, RuntimeWarning) and re.match(_UNSTARTED_COROUTINE, text)
    if not late and not unbegun:
        hook(unraisable)
