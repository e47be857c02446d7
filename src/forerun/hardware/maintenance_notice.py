"""Notices of preemption and maintenance from Google Cloud's metadata server."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping

from forerun.errors import UserError
from forerun.redirects import RedirectHandler

URL = "http://metadata.google.internal"
_ABOUT = "/computeMetadata/v1/instance/"
ANSWER_SECONDS = 2.0
PREEMPTED_SECONDS = 30.0
MAINTENANCE_SECONDS = 60.0


def metadata_url(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of the metadata server. Google's own libraries read GCE_METADATA_HOST, too."""
    host = environment.get("GCE_METADATA_HOST")
    return environment.get("FORERUN_METADATA_URL") or (f"http://{host}" if host else URL)


def read(url: str, name: str, most_bytes: int = 200) -> str | None:
    """Return a value from the metadata server, or None if no such server answers."""
    request = urllib.request.Request(f"{url}{_ABOUT}{name}", headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), RedirectHandler)
    try:
        with direct.open(request, timeout=ANSWER_SECONDS) as answer:
            if answer.headers.get("Metadata-Flavor") != "Google":
                return None
            return str(answer.read(most_bytes).decode(errors="replace").strip())
    except (OSError, ValueError, UserError):
        return None


def announced(url: str) -> tuple[str, float] | None:
    """Return (reason, seconds) if this machine will be stopped, else None. A live migration needs no stop."""
    if read(url, "preempted") == "TRUE":
        return "the cloud preempts this machine", PREEMPTED_SECONDS
    if (read(url, "maintenance-event") or "").startswith("TERMINATE"):
        return "the cloud will end this machine for maintenance", MAINTENANCE_SECONDS
    return None


def watch(url: str, on_notice: Callable[[str, float], None], every_seconds: float = 1.0) -> threading.Thread:
    """Start a thread that polls for a notice and calls `on_notice` once with its reason and seconds.

    If no metadata server answers, this machine is not in Google Cloud and the thread ends immediately.
    """

    def look() -> None:
        if read(url, "maintenance-event") is None:
            return
        while (found := announced(url)) is None:
            time.sleep(every_seconds)
        on_notice(*found)

    thread = threading.Thread(target=look, name="metadata", daemon=True)
    thread.start()
    return thread
