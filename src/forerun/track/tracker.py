"""What a tracker is, and which ones a job names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forerun.config.track import Track
from forerun.errors import UserError
from forerun.models.plugin import import_plugin

Row = Mapping[str, Any]  # a line of metrics.jsonl: `step`, `unix_seconds`, and figures that are numbers or null


@dataclass(frozen=True)
class Run:
    """What a tracker is told of the run. `token` is the run's own and stays the same when it is resumed."""

    name: str
    folder: Path
    token: str
    job: Mapping[str, Any] = field(repr=False)


class Tracker(Protocol):
    """Called by one thread, never by the loop. Whatever it raises is told, and the same call comes again later."""

    def begin(self, run: Run) -> int | None:
        """Connect. The last step that it has of this run; None if it cannot say."""

    def send(self, rows: Sequence[Row]) -> None:
        """Rows by ascending step. If it raises, the same rows come again: to take them twice must not double them."""


def trackers_of(track: Track) -> dict[str, Tracker]:
    """By name, in the job's order. Mistakes are found here, before the run starts; servers are not asked yet."""
    return {name: _tracker(name, track) for name in track.to}


def _tracker(name: str, track: Track) -> Tracker:
    if name == "tensorboard":
        from forerun.track.tensorboard import TensorBoard

        return TensorBoard()
    if name == "mlflow":
        from forerun.track.mlflow import Mlflow, server_of

        return Mlflow(server_of(track.url), track.experiment)
    return _plugin(name)


def _plugin(name: str) -> Tracker:
    """`module.path:Class`, called without arguments: its settings and secrets come from the environment."""
    module, _, made = name.partition(":")
    try:
        found: Tracker = getattr(import_plugin(module), made)()
    except ModuleNotFoundError as error:
        raise UserError(
            f"track.to {name!r}: module {error.name!r} was not found",
            why="modules are looked for beside the job file and among installed packages",
            fix=f"put {module}.py beside the job file, or install its package",
        ) from error
    except (AttributeError, TypeError) as error:
        raise UserError(
            f"track.to {name!r}: {error}",
            why="the part behind the colon is a class of that module, made without arguments",
            fix="mend the name or the class",
        ) from error
    lacks = [part for part in ("begin", "send") if not callable(getattr(found, part, None))]
    if lacks:
        raise UserError(
            f"track.to {name!r} lacks {' and '.join(lacks)}",
            why="a tracker of your own gives what forerun.track.tracker.Tracker lists",
            fix="see docs/train.md, Trackers",
        )
    return found
