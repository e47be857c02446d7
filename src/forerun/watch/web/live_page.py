"""The newest page of a run. It is rendered again only if the run has news."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import resources

from forerun.errors import UserError
from forerun.pages.render import chart_script, script_digest
from forerun.report.page import page
from forerun.report.run_facts import run_facts
from forerun.report.run_files import DamagedRunFile
from forerun.report.run_record import RunRecord
from forerun.report.run_status import RunState, RunStatus, status_of
from forerun.watch.run_reader import RunReader


def live_script() -> str:
    """Return the script that keeps the page up to date."""
    return resources.files("forerun.watch.web").joinpath("live.js").read_text("utf-8")


def policy() -> str:
    """Return the Content-Security-Policy: the two scripts of the page, and requests to its own server."""
    scripts = " ".join(f"'{script_digest(text)}'" for text in (chart_script(), live_script()))
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class LivePage:
    """The page of a run, for several threads. The files are read at most once in `reader.every_seconds`."""

    def __init__(
        self,
        reader: RunReader,
        clock: Callable[[], float] = time.monotonic,
        render: Callable[[RunRecord, RunStatus], str] | None = None,
    ) -> None:
        self._reader, self._clock, self._render = reader, clock, render or _rendered
        self._lock = threading.Lock()
        self._record = reader.read()
        self._read_at = clock()
        self._version, self._content = "", b""
        self._damage: DamagedRunFile | None = None

    def newest(self) -> tuple[str, bytes]:
        """Return the version of the page and its content. Equal versions have equal content.

        Raises:
          DamagedRunFile: a file of the run has a value of a wrong type. The page returns when the file is repaired.
        """
        with self._lock:
            if self._clock() - self._read_at >= self._reader.every_seconds:
                self._refresh()
            if self._damage is not None:
                raise self._damage
            status = status_of(self._record, self._reader.folder)
            version = version_of(self._record, status)
            if version != self._version:
                self._content = self._render(self._record, status).encode()
                self._version = version
            return self._version, self._content

    def _refresh(self) -> None:
        """Read what is new. A run that cannot be read now keeps its last page."""
        self._read_at = self._clock()
        try:
            self._record, self._damage = self._reader.read(), None
        except DamagedRunFile as error:
            self._damage = error
        except (UserError, OSError):
            return


def version_of(record: RunRecord, status: RunStatus) -> str:
    """Return a digest that changes with the records of a run and with its status."""
    last = [rows[-1] if rows else None for rows in (record.metrics, record.events, record.exports)]
    counts = [len(record.metrics), len(record.events), len(record.exports), len(record.skips)]
    # The text of a silent run changes all the time; a minute is enough.
    silent = round((status.age_seconds or 0.0) / 60) if status.state is RunState.SILENT else 0
    parts = [counts, last, record.summary, record.hosts, record.job.steps, str(status.state), status.detail, silent]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def _rendered(record: RunRecord, status: RunStatus) -> str:
    return page(record, replace(run_facts(record), status=status), live_script=live_script())
