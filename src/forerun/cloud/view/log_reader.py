"""The log of a host, which its agent writes to the bucket in parts."""

from __future__ import annotations

from forerun.cloud.record.run_files import RunFiles

PARTS_AT_ONCE = 16
# A part that cannot be created leaves a gap in the numbers, which only a listing finds. Reads by name are cheaper.
READS_PER_LISTING = 10


class LogReader:
    """Reads the parts of one host's log, each once and in their order.

    Args:
      files: the record of the run.
      attempt: the number of the attempt.
      host: the index of the host.
    """

    def __init__(self, files: RunFiles, attempt: int, host: int) -> None:
        self._folder = files.files.inside(f"logs/{attempt:03}-{host:02}")
        self._next: int | None = None
        self._reads = 0

    def read(self) -> bytes:
        """Return what was added since the last call. If it fails, the next call returns the same bytes."""
        if self._next is None or self._reads % READS_PER_LISTING == 0:
            content = self._read_listed()
        else:
            content = self._read_following()
        self._reads += 1
        return content

    def _read_listed(self) -> bytes:
        first = self._next or 0
        numbers = sorted(
            int(name.removesuffix(".log")) for name in self._folder.files() if name.removesuffix(".log").isdecimal()
        )
        wanted = [number for number in numbers if number >= first]
        parts = self._folder.read_many([_name(number) for number in wanted])
        if wanted:
            self._next = wanted[-1] + 1
        return b"".join(part for part in parts if part is not None)

    def _read_following(self) -> bytes:
        content = b""
        assert self._next is not None
        while True:
            following = self._next
            parts = self._folder.read_many([_name(following + index) for index in range(PARTS_AT_ONCE)])
            for part in parts:
                if part is None:
                    return content
                content += part
                self._next += 1


def _name(number: int) -> str:
    return f"{number:06}.log"
