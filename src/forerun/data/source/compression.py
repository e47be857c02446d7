"""Streams of decompressed bytes, for gzip and zstd."""

from __future__ import annotations

import gzip
import io
from typing import Any, BinaryIO, cast

_CHUNK_BYTES = 1 << 11  # at most 64 MiB after decompression: a zstd block of 4 bytes can hold 128 KiB
_BUFFER_BYTES = 1 << 17


def decompressed(raw: Any, packed: str, zstandard: Any = None) -> BinaryIO:
    """Return a stream of the decompressed bytes of `raw`. `packed` is "", ".gz" or ".zst"."""
    if packed == ".gz":
        return cast(BinaryIO, _Gzip(raw))
    if packed == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zstd(raw, zstandard), _BUFFER_BYTES))
    return cast(BinaryIO, raw)


class BadZstd(OSError):
    """An error for bytes that are not valid zstd, like gzip.BadGzipFile for gzip."""


class _Gzip(gzip.GzipFile):
    """A gzip stream that also closes the underlying file."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(fileobj=raw, mode="rb")
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()


class _Zstd(io.RawIOBase):
    """A stream of decompressed zstd frames.

    An incomplete last frame raises EOFError. The reader of zstandard does not report it.
    """

    def __init__(self, raw: BinaryIO, zstandard: Any) -> None:
        self._raw, self._library = raw, zstandard
        self._frame: Any = None
        self._rest, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._rest or self._raw.read(_CHUNK_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame has no end")
                return 0
            self._unpack(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _unpack(self, packed: bytes) -> None:
        frame = self._frame or self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            self._ready = memoryview(frame.decompress(packed))
        except self._library.ZstdError as error:
            raise BadZstd(f"not a zstd frame: {error}") from error
        self._frame, self._rest = (None, frame.unused_data) if frame.eof else (frame, b"")

    def close(self) -> None:
        self._raw.close()
        super().close()
