"""Orbax tells its errors as exceptions; its log (hundreds of lines for one full disk) is not for the user."""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any


def quiet_orbax() -> None:
    logging.getLogger("absl").addFilter(_not_from_orbax)


def forget(response: Any) -> None:
    """Of a save that failed before it wrote: what Orbax did not come to do would be told as "never awaited"."""
    rest = getattr(response, "_background_awaitable", None)
    with suppress(RuntimeError, ValueError):  # it ran, or runs
        if inspect.iscoroutine(rest):
            rest.close()


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in Path(record.pathname).parts or record.levelno >= logging.CRITICAL
