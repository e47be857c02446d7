"""The cloud's notice that this machine will be taken away: asked of Google's metadata server, if there is one."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable

URL = "http://metadata.google.internal"
_ABOUT = "/computeMetadata/v1/instance/"
ANSWER_SECONDS = 2.0
PREEMPTED_SECONDS = 30.0
MAINTENANCE_SECONDS = 60.0


def read(url: str, name: str, most_bytes: int = 200) -> str | None:
    """Return one value of the metadata server; None if there is no answer, or not from such a server."""
    request = urllib.request.Request(f"{url}{_ABOUT}{name}", headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=ANSWER_SECONDS) as answer:
            if answer.headers.get("Metadata-Flavor") != "Google":
                return None
            return str(answer.read(most_bytes).decode(errors="replace").strip())
    except (OSError, ValueError):
        return None


def announced(url: str) -> tuple[str, float] | None:
    """Why this machine will go and in how many seconds; None if it stays. A live migration needs no stop."""
    if read(url, "preempted") == "TRUE":
        return "the cloud preempts this machine", PREEMPTED_SECONDS
    if (read(url, "maintenance-event") or "").startswith("TERMINATE"):
        return "the cloud will end this machine for maintenance", MAINTENANCE_SECONDS
    return None


def watch(url: str, tell: Callable[[str, float], None], every_seconds: float = 1.0) -> threading.Thread:
    """Tells once, from a thread. Ends at once where no metadata server answers: this is not that cloud."""

    def look() -> None:
        if read(url, "maintenance-event") is None:
            return
        while (found := announced(url)) is None:
            time.sleep(every_seconds)
        tell(*found)

    thread = threading.Thread(target=look, name="metadata", daemon=True)
    thread.start()
    return thread
