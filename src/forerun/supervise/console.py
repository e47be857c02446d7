"""The output of a supervisor. A terminal that does not read must not block supervision."""

from __future__ import annotations

import codecs
import queue
import sys
import threading
from contextlib import suppress

from forerun.reporter import Reporter
from forerun.safe_text import clean

MAX_PENDING_TEXTS = 1000
CLOSE_SECONDS = 5.0


class Console(Reporter):
    """A writer to stderr with its own thread. If the reader is stuck, further text is dropped."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._pending: queue.Queue[bytes | None] = queue.Queue(MAX_PENDING_TEXTS)
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    def info(self, text: str) -> None:
        """Print a message after the prefix of this supervisor."""
        self._put(f"{self._prefix}: {clean(text)}\n")

    def write(self, data: bytes) -> None:
        """Print what a worker wrote to its stderr. Native libraries may write control characters, which are escaped."""
        self._put(clean(self._decoder.decode(data)))

    def _put(self, text: str) -> None:
        with suppress(queue.Full):
            self._pending.put_nowait(text.encode())

    def close(self) -> None:
        """Write the pending text, for at most CLOSE_SECONDS."""
        with suppress(queue.Full):
            self._pending.put_nowait(None)
        self._thread.join(CLOSE_SECONDS)

    def _write(self) -> None:
        while (data := self._pending.get()) is not None:
            with suppress(OSError, ValueError):
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()
