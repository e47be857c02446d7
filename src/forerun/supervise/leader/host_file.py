"""`hosts.json` in the folder of a run: the progress of each host, for programs that show the run.

The leader must not wait for a slow disk, because the hosts would miss its beats. A daemon thread therefore writes the
file, and no error of a write reaches the leader.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.supervise.leader.leader_view import LeaderView

NAME = "hosts.json"
EVERY_SECONDS = 2.0  # at least, between two writes


def hosts_content(view: LeaderView, now: float, unix_seconds: float) -> dict[str, Any]:
    """Return the content of `hosts.json`.

    Args:
        view: The state of the leader.
        now: The time of its monotonic clock.
        unix_seconds: The time of the wall clock.
    """
    # Before the first attempt, all hosts that are connected.
    members = view.ordered_members() or [view.members[index] for index in sorted(view.members)]
    slices = view.policy.count_of(view.taking_part)
    first = view.reached_step()
    return {
        "unix_seconds": round(unix_seconds, 3),
        "attempt": view.attempt,
        **({} if slices is None else {"slices": slices, "of_slices": view.policy.slices}),
        "hosts": [
            {
                "index": member.index,
                "name": member.name,
                "phase": member.view.phase,
                "step": member.step,
                "lag": first - member.step,
                "save_seconds": member.view.save_seconds,
                "memory": member.view.memory,
                "memory_bytes": member.view.memory_bytes,
                "memory_limit_bytes": member.view.memory_limit_bytes,
                "age_seconds": round(max(0.0, member.silent_seconds(now)), 3),
            }
            for member in members
        ],
    }


class HostFile:
    """The thread that writes `hosts.json`, at most every `EVERY_SECONDS`.

    Args:
        run: The folder of the run.
        write: Writes a text to a path. Tests replace it.
    """

    def __init__(self, run: Path, write: Callable[[Path, str], None] | None = None) -> None:
        self._path, self._write = run / NAME, write or replace_file
        self._content: Mapping[str, Any] | None = None
        self._due = -EVERY_SECONDS
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="hosts.json", daemon=True)
        self._thread.start()

    def update(self, view: LeaderView, now: float) -> None:
        """Have the state written if the last write was long ago. This never waits for the disk."""
        if now >= self._due:
            self._due = now + EVERY_SECONDS
            with self._changed:
                self._content = hosts_content(view, now, time.time())
                self._changed.notify()

    def close(self, view: LeaderView, now: float) -> None:
        """Have the last state written, and wait for it for a second at most."""
        self._due = now
        self.update(view, now)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(1.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._content is not None or self._closed)
                content, self._content = self._content, None
            if content is None:
                return
            with suppress(Exception):  # a full disk, or a folder that --fresh has renamed
                self._write(self._path, json.dumps(content) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Replace a file in one step. Unlike `atomic_write`, this does not wait until the content is on the disk."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, "utf-8")
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
