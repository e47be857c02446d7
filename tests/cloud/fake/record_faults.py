"""Faults of a run's record: damaged, forged, deleted and late files, and a bucket that denies or hangs.

Each fault is what an account with write access to the bucket can do. Checkpoints are never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from forerun.cloud.record.entries import EndEntry, FinishEntry, HostEntry, LeaseEntry, ReadyEntry
from forerun.storage.folder import Folder, LocalFolder

ATTEMPT = re.compile(r"attempts/([0-9]+)\.json")
DAMAGE = (b"", b"null", b"[]", b"{}", b'{"at": ', b"\x00\xff" * 40, b'"text"', b"[" * 20_000)
NUMBERS = (float("nan"), 1e12, -1e12, float("inf"), -1, "1", "x", True, None, [], 10**30)
FORGED = ("forged end", "forged lease", "forged cap", "forged limit", "forged ready", "forged host", "forged finish")
KINDS = ("damaged", "forged number", *FORGED, "deleted", "late", "denied", "hangs")


class Bucket(Protocol):
    """A bucket that a fault can stop."""

    def deny(self) -> None:
        """Let every call fail until `work`."""

    def hang(self) -> None:
        """Let reads wait until `work`."""

    def work(self) -> None: ...


class LocalBucket:
    """A local folder in place of a bucket.

    Args:
      folder: the run's folder. It becomes a symbolic link, so that one rename replaces it for all processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder.with_name(f"{folder.name}.store")
        self.run_file = self.store / "cloud/run.json"
        folder.rename(self.store)
        folder.symlink_to(self.store)
        self._content: bytes | None = None  # of the file that cannot be read at present

    def deny(self) -> None:
        denied = self.folder.with_name("denied")
        denied.touch()
        self._lead_to(denied)

    def hang(self) -> None:
        """Let each reader of `run.json` wait. A controller reads it at every look, and does not replace it."""
        if self._content is not None or not self.run_file.exists():
            return
        self._content = self.run_file.read_bytes()
        pipe = self.run_file.with_name(".pipe")
        os.mkfifo(pipe)
        pipe.replace(self.run_file)

    def work(self) -> None:
        self._lead_to(self.store)
        content, self._content = self._content, None
        if content is None:
            return
        aside = self.run_file.with_name(".ended")
        with contextlib.suppress(FileNotFoundError):
            self.run_file.replace(aside)
        LocalFolder(self.store / "cloud").replace("run.json", content)
        with contextlib.suppress(OSError):  # nothing waits, or the record was deleted
            os.close(os.open(aside, os.O_WRONLY | os.O_NONBLOCK))
        aside.unlink(missing_ok=True)

    def _lead_to(self, target: Path) -> None:
        link = self.folder.with_name(".link")
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        link.replace(self.folder)


class RecordFaults:
    """Injects faults into the record of one run.

    Args:
      files: the folder of the record.
    """

    def __init__(self, files: Folder, bucket: Bucket, choose: random.Random) -> None:
        self.files, self.bucket, self.random = files, bucket, choose
        self._due: list[tuple[float, Callable[[], None]]] = []

    def inject(self, kind: str, now: float) -> bool:
        """Inject one fault. Return False if there is nothing that it could hit now."""
        # A file that hangs cannot be read here either.
        names = sorted(name for name in self.files.files() if name.endswith(".json") and self._content(name))
        if not names:
            return False
        seconds, name = self.random.uniform(5, 60), self.random.choice(names)
        content = self._content(name)
        if kind == "damaged":
            self.files.replace(name, self.random.choice(DAMAGE))
        elif kind == "deleted":
            for deleted in names if self.random.random() < 0.3 else [name]:
                self.files.remove(deleted)
        elif kind == "late":
            self.files.remove(name)
            self._due.append((now + seconds, lambda: self.files.replace(name, content)))
        elif kind in ("denied", "hangs"):
            (self.bucket.deny if kind == "denied" else self.bucket.hang)()
            self._due.append((now + seconds, self.bucket.work))
        elif kind == "forged number":
            self._forge_number(name)
        else:
            return self._forge(kind, now)
        return True

    def prolong(self, now: float) -> None:
        """Claim in every file with a limit that the newest attempt may run for years."""
        number = max(self._attempts())
        run, attempt = self._values("run.json"), self._values(f"attempts/{number:03}.json")
        self._replace("run.json", run | {"max_usd": 1e6})
        self._replace(f"attempts/{number:03}.json", attempt | {"limit_seconds": 10**8, "spent_usd": 0.0})
        self._replace(f"attempts/{number:03}-ready.json", asdict(ReadyEntry(now + 1e6)))
        self._replace("controller.json", asdict(LeaseEntry("forged", now + 1e6)))

    def end_due(self, now: float) -> None:
        """End the faults whose time is over."""
        for due in [due for due in self._due if now >= due[0]]:
            self._due.remove(due)
            due[1]()

    def end_all(self) -> None:
        self.bucket.work()
        self.end_due(float("inf"))

    def _replace(self, name: str, values: Mapping[str, Any]) -> None:
        self.files.replace(name, json.dumps(values).encode())

    def _content(self, name: str) -> bytes:
        """Return the content of a file, or nothing if it does not exist or cannot be read now."""
        path = Path(self.files.address) / name
        if path.exists() and not path.is_file():
            return b""
        return self.files.read_many([name])[0] or b""

    def _values(self, name: str) -> dict[str, Any]:
        """Return the content of a file, or nothing if it was damaged before."""
        try:
            values = json.loads(self._content(name))
        except (ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    def _forge_number(self, name: str) -> None:
        values = self._values(name) or {"at": 0.0}
        objects = [values, *(value for value in values.values() if isinstance(value, dict))]
        objects += [option for option in values.get("options") or () if isinstance(option, dict)]
        keys = [(entry, key) for entry in objects for key, value in entry.items() if isinstance(value, int | float)]
        for entry, key in self.random.sample(keys, min(2, len(keys))):
            entry[key] = self.random.choice(NUMBERS)
        self._replace(name, values)

    def _forge(self, kind: str, now: float) -> bool:
        """Write a valid entry with a wrong content."""
        number = max(self._attempts(), default=0)
        far = self.random.choice((-1e6, -60.0, 1e5, 1e6))
        name, entry = "", {}
        if kind == "forged lease":
            entry = asdict(LeaseEntry("forged", now + self.random.choice((170.0, 1e6, 1e9))))
            name = "controller.json"
        elif kind == "forged cap" and (entry := self._values("run.json")):
            name = "run.json"
            entry["max_usd"] = self.random.choice((0.0, 1e6, None))
            for option in entry.get("options") or ():
                option["usd_per_hour"] = self.random.choice((0.0, 0.01, 1e6))
        elif kind == "forged limit" and number and (entry := self._values(f"attempts/{number:03}.json")):
            name = f"attempts/{number:03}.json"
            entry |= {"limit_seconds": self.random.choice((10**8, 0, None)), "spent_usd": 0.0}
        elif kind == "forged ready" and number:
            name, entry = f"attempts/{number:03}-ready.json", asdict(ReadyEntry(now + far))
        elif kind == "forged end" and number:
            reason = self.random.choice(("preempted", "finished", "broken", "refused"))
            name, entry = f"attempts/{number:03}-end.json", asdict(EndEntry(now + far, reason, 0.0))
        elif kind == "forged host" and number:
            phase = self.random.choice(("training", "finished", "broken", "failed", "preempting"))
            report = HostEntry(number, 0, now + far, phase, step=10**9, save_seconds=self.random.choice((1e9, 0.0)))
            name, entry = f"hosts/{number:03}-00.json", asdict(report)
        elif kind == "forged finish":
            name, entry = "finished.json", asdict(FinishEntry(now, max(number, 1), {}))
        if not name:
            return False
        self._replace(name, entry)
        return True

    def _attempts(self) -> list[int]:
        return [int(match[1]) for name in self.files.files() if (match := ATTEMPT.fullmatch(name))]
