"""Faults of a run's record: damaged, forged, deleted and late files, and a bucket that denies or hangs.

The bucket is a local folder. Each fault is what an account with write access to the bucket can do, except that
checkpoints are never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.cloud.record.entries import EndEntry, FinishEntry, HostEntry, LeaseEntry, ReadyEntry

DAMAGE = (b"", b"null", b"[]", b"{}", b'{"at": ', b"\x00\xff" * 40, b'"text"', b"[" * 20_000)
NUMBERS = (float("nan"), 1e12, -1e12, float("inf"), -1, "1", "x", True, None, [], 10**30)
FORGED = ("forged end", "forged lease", "forged cap", "forged limit", "forged ready", "forged host", "forged finish")
KINDS = ("damaged", "forged number", *FORGED, "deleted", "late", "denied", "hangs")


class RecordFaults:
    """Injects faults into the record of one run.

    Args:
      folder: the run's folder in the bucket. It becomes a symbolic link, so that one rename replaces the bucket.
    """

    def __init__(self, folder: Path, choose: random.Random) -> None:
        self.folder, self.random = folder, choose
        self.store = folder.with_name(f"{folder.name}.store")
        folder.rename(self.store)
        folder.symlink_to(self.store)
        self._due: list[tuple[float, Callable[[], None]]] = []

    def inject(self, kind: str, now: float) -> bool:
        """Inject one fault. Return False if there is nothing that it could hit now."""
        cloud = self.store / "cloud"
        files = sorted(path.relative_to(cloud).as_posix() for path in cloud.rglob("[!.]*.json") if path.is_file())
        if not files:
            return False
        seconds = self.random.uniform(5, 60)
        name = self.random.choice(files)
        if kind == "damaged":
            self._write(name, self.random.choice(DAMAGE))
        elif kind == "deleted":
            if self.random.random() < 0.3:
                shutil.rmtree(cloud, ignore_errors=True)  # a file may appear in the meantime
            else:
                (cloud / name).unlink(missing_ok=True)
        elif kind == "late":
            content = (cloud / name).read_bytes()
            (cloud / name).unlink(missing_ok=True)
            self._due.append((now + seconds, lambda: self._write(name, content)))
        elif kind == "denied":
            self.deny()
            self._due.append((now + seconds, self.allow))
        elif kind == "hangs":
            self._hang(seconds, now)
        elif kind == "forged number":
            self._forge_number(name)
        else:
            return self._forge(kind, now)
        return True

    def end_due(self, now: float) -> None:
        """End the faults whose time is over."""
        for due in [due for due in self._due if now >= due[0]]:
            self._due.remove(due)
            due[1]()

    def end_all(self) -> None:
        self.end_due(float("inf"))
        self.allow()

    def deny(self) -> None:
        """Let every call of the bucket fail."""
        denied = self.folder.with_name("denied")
        denied.touch()
        self._lead_to(denied)

    def allow(self) -> None:
        self._lead_to(self.store)

    def _lead_to(self, target: Path) -> None:
        link = self.folder.with_name(".link")
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        link.replace(self.folder)

    def _hang(self, seconds: float, now: float) -> None:
        """Let each reader of `run.json` wait. It is read at every look, and replaced by no controller that runs."""
        file = self.store / "cloud/run.json"
        content = file.read_bytes() if file.exists() else b"{}"
        pipe = file.with_name(".pipe")
        os.mkfifo(pipe)
        pipe.replace(file)

        def end() -> None:
            aside = file.with_name(".ended")
            with contextlib.suppress(FileNotFoundError):
                file.replace(aside)
            self._write("run.json", content)
            with contextlib.suppress(OSError):  # no reader waits, or a controller has replaced it
                os.close(os.open(aside, os.O_WRONLY | os.O_NONBLOCK))
            aside.unlink(missing_ok=True)

        self._due.append((now + seconds, end))

    def _write(self, name: str, content: bytes) -> None:
        file = self.store / "cloud" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f".{file.name}.fault")
        written.write_bytes(content)
        written.replace(file)

    def _values(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file; None if it does not exist or was damaged before."""
        file = self.store / "cloud" / name
        if not file.is_file():
            return None
        try:
            values = json.loads(file.read_bytes())
        except (ValueError, RecursionError):
            return None
        return values if isinstance(values, dict) else None

    def _forge_number(self, name: str) -> None:
        values = self._values(name) or {"at": 0.0}
        objects = [values, *(value for value in values.values() if isinstance(value, dict))]
        objects += [option for option in values.get("options") or () if isinstance(option, dict)]
        keys = [(one, key) for one in objects for key, value in one.items() if isinstance(value, int | float)]
        for one, key in self.random.sample(keys, min(2, len(keys))):
            one[key] = self.random.choice(NUMBERS)
        self._write(name, json.dumps(values).encode())

    def _forge(self, kind: str, now: float) -> bool:
        """Write a valid entry with a wrong content."""
        number = max(self._attempts(), default=0)
        far = self.random.choice((-1e6, -60.0, 1e5, 1e6))
        name, entry = "", {}
        if kind == "forged lease":
            entry = asdict(LeaseEntry("forged", now + self.random.choice((170.0, 1e6, 1e9))))
            name = "controller.json"
        elif kind == "forged cap" and (entry := self._values("run.json") or {}):
            name = "run.json"
            entry["max_usd"] = self.random.choice((0.0, 1e6, None))
            for option in entry.get("options") or ():
                option["usd_per_hour"] = self.random.choice((0.0, 0.01, 1e6))
        elif kind == "forged limit" and number and (entry := self._values(f"attempts/{number:03}.json") or {}):
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
        self._write(name, json.dumps(entry).encode())
        return True

    def _attempts(self) -> list[int]:
        names = (path.stem for path in (self.store / "cloud/attempts").glob("[0-9]*.json"))
        return [int(name) for name in names if name.isdigit()]
