"""The log of a host in the bucket: its agent writes numbered parts, and `forerun logs` reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from forerun.cloud.record.run_files import RunFiles
from forerun.files import atomic_write

PART_BYTES = 1 << 20
MOST_BYTES = 1 << 50  # a larger position is not credible


class LogCopy:
    """Copies new lines of some logs to the bucket.

    A restarted agent continues where the last one ended: a file holds the number of the next part and the position in
    each log. If the agent was killed between a part and this file, the part exists already, and its length moves the
    position forward.

    Args:
      logs: the files, in the order in which they are copied.
      position: the file with the position.
    """

    def __init__(self, files: RunFiles, attempt: int, host: int, logs: Sequence[Path], position: Path) -> None:
        self._files, self._attempt, self._host = files, attempt, host
        self._logs, self._position = logs, position
        self._part, self._offsets = self._restored()

    def copy(self, *, is_last: bool = False) -> None:
        """Copy all complete new lines; with `is_last`, also an incomplete one."""
        for log in self._logs:
            while content := self._new_lines(log, is_last=is_last):
                self._add(log, content)

    def _new_lines(self, log: Path, *, is_last: bool) -> bytes:
        offset = self._offsets.get(log.name, 0)
        try:
            with log.open("rb") as file:
                file.seek(offset)
                content = file.read(PART_BYTES)
        except OSError:
            return b""
        end = content.rfind(b"\n") + 1
        return content if is_last or (not end and len(content) == PART_BYTES) else content[:end]

    def _add(self, log: Path, content: bytes) -> None:
        name = f"logs/{self._attempt:03}-{self._host:02}/{self._part:06}.log"
        (existing,) = self._files.files.read_many([name])
        if existing is None:
            self._files.add_log(self._attempt, self._host, self._part, content)
            length = len(content)
        else:
            length = len(existing) if content.startswith(existing) else 0
        self._part += 1
        self._offsets[log.name] = self._offsets.get(log.name, 0) + length
        atomic_write(self._position, json.dumps({"part": self._part, "offsets": self._offsets}) + "\n")

    def _restored(self) -> tuple[int, dict[str, int]]:
        try:
            position = json.loads(self._position.read_bytes())
            part, offsets = position["part"], dict(position["offsets"])
            if all(type(number) is int and 0 <= number < MOST_BYTES for number in (part, *offsets.values())):
                return part, offsets
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return 0, {}


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
