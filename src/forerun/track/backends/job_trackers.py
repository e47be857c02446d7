"""Creation of the trackers that a job names."""

from __future__ import annotations

from forerun.config.run_sections import Track
from forerun.errors import UserError
from forerun.models.plugin import import_plugin
from forerun.track.tracker import Tracker


def trackers_of(track: Track) -> dict[str, Tracker]:
    """Return the trackers of a job by name. Raise UserError for mistakes in the job. No server is contacted yet."""
    return {name: _tracker(name, track) for name in track.to}


def _tracker(name: str, track: Track) -> Tracker:
    if name == "tensorboard":
        from forerun.track.backends.tensorboard import TensorBoard

        return TensorBoard()
    if name == "mlflow":
        from forerun.track.backends.mlflow import Mlflow, server_of

        return Mlflow(server_of(track.url), track.experiment)
    if name in ("wandb", "trackio"):
        from forerun.track.backends.client_process import ClientProcess, require_client
        from forerun.track.backends.wandb import require_login

        require_client(name)
        if name == "trackio":
            return ClientProcess(name, {"project": track.project})
        require_login()
        return ClientProcess(name, {"project": track.project, "entity": track.entity})
    return _plugin(name)


def _plugin(name: str) -> Tracker:
    """Return an instance of the class `module.path:Class`.

    The class is called without arguments, so its settings and secrets come from the environment.
    """
    module, _, class_name = name.partition(":")
    try:
        found: Tracker = getattr(import_plugin(module), class_name)()
    except ModuleNotFoundError as error:
        raise UserError(
            "E-TRACK-004",
            f"track.to {name!r}: module {error.name!r} was not found",
            why="forerun searches the folder of the job file and the installed packages",
            fix=f"put {module}.py beside the job file, or install its package",
        ) from error
    except (AttributeError, TypeError) as error:
        raise UserError(
            "E-TRACK-005",
            f"track.to {name!r}: {error}",
            why="the part after the colon must be a class of that module that takes no arguments",
            fix="correct the name or the class",
        ) from error
    missing = [part for part in ("begin", "send") if not callable(getattr(found, part, None))]
    if missing:
        raise UserError(
            "E-TRACK-006",
            f"track.to {name!r} lacks {' and '.join(missing)}",
            why="a custom tracker must have the methods of forerun.track.tracker.Tracker",
            fix="see docs/how-to/trackers.md",
        )
    return found
