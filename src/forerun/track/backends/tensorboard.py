"""The tracker of TensorBoard. It writes event files to `tensorboard/` in the folder of the run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.installation import install_command
from forerun.track.tracker import Row, TrackedRun

FOLDER = "tensorboard"


class TensorBoard:
    """The event files of a run, written with TensorBoard's own writer."""

    def __init__(self) -> None:
        try:
            importlib.import_module("tensorboard")
        except ImportError as error:
            raise UserError(
                "E-TRACK-003",
                "track.to: tensorboard is not installed",
                why=str(error),
                fix=f"{install_command('tensorboard')}; or remove it from track.to",
            ) from error
        self._writer: Any = None

    def begin(self, run: TrackedRun) -> int | None:
        """Open a new event file, and return the last step in the existing files, or 0.

        The step does not include records that a kill truncated.
        """
        folder = run.folder / FOLDER
        last = max((last_step(path) for path in sorted(folder.glob("events.out.tfevents.*"))), default=0)
        if self._writer is None:
            writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            self._writer = writer.EventFileWriter(str(folder))
        return last

    def send(self, rows: Sequence[Row]) -> None:
        event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        for row in rows:
            values = [summary.Summary.Value(tag=key, simple_value=value) for key, value in figures_of(row).items()]
            if row.get("samples"):
                values.append(_samples_value(summary, row["samples"]))
            made = event.Event(wall_time=row["unix_seconds"], step=row["step"], summary=summary.Summary(value=values))
            self._writer.add_event(made)
        self._writer.flush()

    def end(self, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()


def figures_of(row: Row) -> dict[str, float]:
    """Return the numbers of a row by key, without `step` and `unix_seconds`. Null values and texts are omitted."""
    named = ("step", "unix_seconds")
    return {
        key: float(value)
        for key, value in row.items()
        if key not in named and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _samples_value(summary: Any, samples: Sequence[Mapping[str, str]]) -> Any:
    """Return samples as a value of TensorBoard's text plugin, which shows Markdown."""
    text: Any = importlib.import_module("tensorboard.plugins.text.metadata")
    tensor: Any = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
    types: Any = importlib.import_module("tensorboard.compat.proto.types_pb2")
    shown = "\n\n".join(f"{_quoted(sample['prompt'])}\n\n{_quoted(sample['text'])}" for sample in samples)
    content = tensor.TensorProto(dtype=types.DT_STRING, string_val=[shown.encode()])
    about = text.create_summary_metadata(display_name="samples", description="prompts and their completions")
    return summary.Summary.Value(tag="samples", metadata=about, tensor=content)


def _quoted(text: str) -> str:
    """Return a text as an indented block of Markdown, in which no character has a meaning."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def last_step(path: Path) -> int:
    """Return the last step in an event file, or 0 if it has none."""
    loader: Any = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    last = 0
    with suppress(Exception):  # the exception for a truncated record differs between releases of TensorBoard
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            last = max(last, int(event.step))
    return last
