"""Times of earlier compilations on this machine, so that a display can show how long one may take."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from forerun.files import atomic_write

MAX_ENTRIES = 500


class CompileTimes:
    """A JSON file with the seconds of the last compilation for each key. It is informative only.

    A file that cannot be read or written is ignored: no result depends on it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or _default_path()

    def expected_seconds(self, *keys: str) -> float | None:
        """Return the time of the first key that is known, or None."""
        times = self._read()
        return next((times[key] for key in keys if key in times), None)

    def record(self, seconds: float, *keys: str) -> None:
        """Store the time under all keys. The oldest entries are removed."""
        times = {key: value for key, value in self._read().items() if key not in keys}
        times |= dict.fromkeys(keys, round(seconds, 3))
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path, json.dumps(dict(list(times.items())[-MAX_ENTRIES:])) + "\n")

    def _read(self) -> dict[str, float]:
        try:
            found = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        entries = found.items() if isinstance(found, dict) else ()
        return {key: float(value) for key, value in entries if isinstance(value, int | float)}


def _default_path() -> Path:
    """Return the file in the user's cache. It is not in the compile cache, so that clearing that keeps the times."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "forerun" / "compile_times.json"
