"""What a supervisor says to the person. A terminal that does not take it must not hold the watch up."""

from __future__ import annotations

import codecs
import queue
import sys
import threading
from contextlib import suppress

from forerun.safe_text import clean

MOST_WAITING = 1000
LAST_WORDS_SECONDS = 5.0


class Voice:
    """Writes to stderr from a thread of its own; what a stuck reader does not take is dropped."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write, name="voice", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        self._put(f"{self._prefix}: {clean(text)}\n")

    def write(self, data: bytes) -> None:
        """Show what a worker wrote to its stderr. A library below Python may have written control characters."""
        self._put(clean(self._decoder.decode(data)))

    def _put(self, text: str) -> None:
        with suppress(queue.Full):
            self._waiting.put_nowait(text.encode())

    def close(self) -> None:
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(LAST_WORDS_SECONDS)

    def _write(self) -> None:
        while (data := self._waiting.get()) is not None:
            with suppress(OSError, ValueError):
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()
