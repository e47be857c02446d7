"""The tracker of Weights & Biases. It runs in a separate process (`forerun.track.backends.client_host`)."""

from __future__ import annotations

import html
import importlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.track.backends.wandb_log import last_step
from forerun.track.tracker import Row, TrackedRun

FINISH_SECONDS = 45.0  # less than the time that the end of a run waits
STORE_SECONDS = 30.0  # until wandb must have written rows to its file
POLL_SECONDS = 0.25  # wandb writes its file every second
KILLED = 255  # wandb's own exit code for a run that was interrupted

SETTINGS = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_save_requirements": False,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_transaction_log_flush_interval": 1.0,
    "finish_timeout": FINISH_SECONDS,
    "finish_timeout_raises": True,
}


class WandbClient:
    """A run in a project of Weights & Biases, or in the folder `wandb` of the run if WANDB_MODE is offline.

    The token of the run is the identifier, so a resumed run continues the same run.
    """

    def __init__(self, project: str, entity: str | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of crashes to the maker of wandb
        self._wandb: Any = importlib.import_module("wandb")
        self._project, self._entity = project, entity
        self._run: Any = None
        self._folder, self._token = Path(), ""

    def begin(self, run: TrackedRun) -> int | None:
        """Create or resume the run, and return its last step, or 0."""
        known = self._wandb.Settings.model_fields  # older releases lack some
        settings = self._wandb.Settings(**{name: value for name, value in SETTINGS.items() if name in known})
        self._folder, self._token = run.folder / "wandb", run.token
        offline = last_step(self._folder, self._token)
        self._run = self._wandb.init(
            project=self._project,
            entity=self._entity,
            id=run.token,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.job),
            resume="allow",
            settings=settings,
        )
        if self._run.disabled:
            return None
        return offline if self._run.offline else max(int(self._run.starting_step) - 1, 0)

    def send(self, rows: Sequence[Row]) -> None:
        """Send rows. Without a server, return when wandb's file has them: a kill loses what is only in its memory."""
        for row in rows:
            values = {key: value for key, value in row.items() if key not in ("step", "unix_seconds", "samples")}
            values = {key: value for key, value in values.items() if value is not None}
            if row.get("samples"):
                # A wandb.Table would create an artifact with its own version for each step.
                values["samples"] = self._wandb.Html(page_of(row["samples"]), inject=False)
            # With `commit`, the client sends the row immediately instead of after the next one.
            self._run.log({**values, "_timestamp": row["unix_seconds"]}, step=row["step"], commit=True)
        if self._run.offline and not self._run.disabled:
            self._wait_for(rows[-1]["step"])

    def _wait_for(self, step: int) -> None:
        """Wait until the offline file has a step."""
        deadline = time.monotonic() + STORE_SECONDS
        while last_step(self._folder, self._token) < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"wandb's file does not have step {step} after {STORE_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def end(self, finished: bool) -> None:
        """Wait until the server has all rows. Raise TimeoutError if it does not confirm them in time."""
        if self._run is not None:
            self._run.finish(exit_code=0 if finished else KILLED)


def page_of(samples: Sequence[Mapping[str, str]]) -> str:
    """Return an HTML table of prompts and texts."""
    cells = [(html.escape(sample["prompt"]), html.escape(sample["text"])) for sample in samples]
    rows = "".join(f"<tr><td><pre>{prompt}</pre></td><td><pre>{text}</pre></td></tr>" for prompt, text in cells)
    style = "pre{white-space:pre-wrap}td,th{text-align:left;vertical-align:top;padding:4px 12px}"
    return f"<style>{style}</style><table><tr><th>prompt</th><th>text</th></tr>{rows}</table>"
