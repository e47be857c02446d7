"""The results of a finished run: the exported model and the run's files, stored in the bucket with their digests."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from forerun.cloud.host.settings import AgentSettings, HostLayout
from forerun.cloud.record.entries import FinishEntry
from forerun.cloud.record.run_files import CLOUD_FOLDER, EXPORT_FOLDER, RunFiles
from forerun.reporter import Reporter

# The files of the run's folder that are stored for `forerun fetch`.
RUN_FILES = ("job.yaml", "summary.json", "metrics.jsonl", "events.jsonl", "skips.jsonl", "report.html", "program.json")
RUN_FOLDER = f"{CLOUD_FOLDER}/run"  # below the run's bucket folder
KILL_SECONDS = 5.0


def start_thread(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


class ResultStore:
    """Exports the model and stores the results in the bucket. It runs in its own thread and can be cancelled.

    Args:
      now: the cloud's clock.
      reporter: receives what is done, for the agent's log.
      start: runs a function in the background; it gets the function and a name.
    """

    def __init__(
        self,
        files: RunFiles,
        settings: AgentSettings,
        layout: HostLayout,
        now: Callable[[], float],
        reporter: Reporter,
        start: Callable[[Callable[[], None], str], None] = start_thread,
    ) -> None:
        self._files, self._settings, self._layout = files, settings, layout
        self._now, self._reporter, self._start = now, reporter, start
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = self._is_running = False
        self.is_done = False
        self.note = ""  # about results that could not be made

    def start(self) -> None:
        """Start, unless it runs. After a failure, start again."""
        if not (self._is_running or self.is_done or self._is_cancelled):
            self._is_running = True
            self._start(self._work, "results")

    def cancel(self) -> None:
        """End the export. What it has stored stays in the bucket."""
        self._is_cancelled = True
        if (process := self._process) is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _work(self) -> None:
        try:
            self.store()
            self.is_done = not self._is_cancelled
        except Exception as error:  # for example, the bucket does not answer: the agent starts it again
            self._reporter.info(f"results: {type(error).__name__}: {error}")
        finally:
            self._is_running = False

    def store(self) -> None:
        """Export the model, store all files, then create `finished.json`."""
        if isinstance(self._files.finished(), FinishEntry):  # a damaged file hides no results
            return
        run = self._layout.job_folder / self._settings.run_folder
        stored: dict[str, tuple[int, str]] = {}
        if self._settings.export and self._export(run):
            for path in sorted(self._layout.export.rglob("*")):
                if path.is_file():
                    name = f"{EXPORT_FOLDER}/{path.relative_to(self._layout.export).as_posix()}"
                    stored[name] = self._put(name, path)
        for name in RUN_FILES:
            if (run / name).is_file():
                stored[f"{RUN_FOLDER}/{name}"] = self._put(f"{RUN_FOLDER}/{name}", run / name)
        if not self._is_cancelled:
            self._files.create_finished(FinishEntry(self._now(), self._settings.attempt, stored))
            self._reporter.info(f"results: stored {len(stored)} files")

    def _export(self, run: Path) -> bool:
        """Run `forerun export`. Return whether it succeeded. The checkpoints remain if it did not."""
        shutil.rmtree(self._layout.export, ignore_errors=True)
        command = [str(self._layout.forerun), "export", str(run), "--to", str(self._layout.export)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._layout.export_log.parent.mkdir(parents=True, exist_ok=True)
        with self._layout.export_log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._layout.job_folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            if self._is_cancelled:  # since the last check
                self._process.kill()
            code = self._process.wait()
        self._reporter.info(f"results: forerun export ended with exit code {code}")
        self.note = "" if code == 0 else f"forerun export ended with exit code {code}; the checkpoints are complete"
        return code == 0 and not self._is_cancelled

    def _put(self, name: str, path: Path) -> tuple[int, str]:
        if self._is_cancelled:
            raise InterruptedError("the export was cancelled")
        content = path.read_bytes()
        self._files.run_folder.replace(name, content)
        return len(content), hashlib.sha256(content).hexdigest()
