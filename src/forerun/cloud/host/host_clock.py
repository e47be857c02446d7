"""The cloud's clock on a host, which also works while the API does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class HostClock:
    """Returns the time of the cloud's clock without a wait.

    Args:
      ask: asks the cloud for its time. It may take long or raise any exception.
      fallback: this machine's clock, for the time before the first answer. Hosts in a cloud are synchronised.
      monotonic: measures the time since the last answer.
    """

    def __init__(
        self,
        ask: Callable[[], float],
        fallback: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._fallback, self._monotonic = ask, fallback, monotonic
        self._lock, self._is_known = threading.Lock(), threading.Event()
        self._known: tuple[float, float] | None = None

    def refresh(self) -> str:
        """Ask the cloud. Return an empty string, or why it did not answer."""
        try:
            answer = self._ask()
        except Exception as error:  # whatever fails, the agent must still enforce the deadline
            return f"{type(error).__name__}: {error}"
        with self._lock:
            self._known = (answer, self._monotonic())
        self._is_known.set()
        return ""

    def wait(self, limit_seconds: float) -> bool:
        """Wait for the first answer. Return whether it has arrived."""
        return self._is_known.wait(limit_seconds)

    def now(self) -> float:
        """Return the time in seconds since 1970."""
        with self._lock:
            known = self._known
        return self._fallback() if known is None else known[0] + self._monotonic() - known[1]
