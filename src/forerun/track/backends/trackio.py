"""The tracker of trackio. It runs in a separate process (`forerun.track.backends.client_process`)."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from forerun.track.tracker import Row, TrackedRun

STORE_SECONDS = 30.0  # until the thread of the client must have written rows to its database
POLL_SECONDS = 0.6  # the thread writes every 0.5 s; each poll opens the database


class TrackioClient:
    """A run in a project of trackio: in its local database, or on the server that TRACKIO_SPACE_ID or _SERVER_URL name.

    trackio finds a run by its name. The name therefore ends with the start of the run's token.
    """

    def __init__(self, project: str) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        self._project = project
        self._run: Any = None

    def begin(self, run: TrackedRun) -> int | None:
        """Create or resume the run, and return its last step, or 0."""
        self._run = self._trackio.init(
            project=self._project,
            name=f"{run.name}-{run.token[:8]}",
            config=dict(run.job),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if self._is_local():
            return self._stored()
        return self._run._next_step - 1 if self._run._next_step else None

    def send(self, rows: Sequence[Row]) -> None:
        """Store rows. Return when the local database has them: a thread of the client writes it twice a second."""
        first = self._stored() + 1 if self._is_local() else 0
        for row in rows:
            if row["step"] >= first:  # the database has earlier rows if a previous call failed
                self._run.log(self._values(row), step=row["step"])
        deadline, last = time.monotonic() + STORE_SECONDS, rows[-1]["step"]
        while self._is_local():
            time.sleep(POLL_SECONDS)
            if self._stored() >= last:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the database does not have step {last} after {STORE_SECONDS:g} s")

    def end(self, finished: bool) -> None:
        if self._run is not None:
            self._run.finish()

    def _values(self, row: Row) -> dict[str, Any]:
        values = {key: value for key, value in row.items() if key not in ("step", "unix_seconds", "samples")}
        values = {key: value for key, value in values.items() if value is not None}
        if row.get("samples"):
            data = [[sample["prompt"], sample["text"]] for sample in row["samples"]]
            values["samples"] = self._trackio.Table(columns=["prompt", "text"], data=data)
        return values

    def _is_local(self) -> bool:
        return bool(self._run._is_local)

    def _stored(self) -> int:
        """Return the last step in the local database, or 0."""
        found = self._storage.get_max_step_for_run(self._project, self._run.name, run_id=self._run.id)
        return int(found or 0)
