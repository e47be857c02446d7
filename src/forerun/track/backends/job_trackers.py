"""Creation of the trackers that a job names."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from forerun.config.run_sections import Track
from forerun.errors import UserError
from forerun.models.plugin import import_plugin
from forerun.track.tracker import Tracker

WANDB_SERVER = "https://api.wandb.ai"
WITHOUT_KEY = ("offline", "dryrun", "disabled")


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


def require_login(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if the client of Weights & Biases would ask for a key: a run has no terminal to answer in.

    forerun never reads the key. It only checks that the client finds one.
    """
    if environment.get("WANDB_MODE", "online") in WITHOUT_KEY:
        return
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    settings = _settings(environment)
    if settings.get("mode") in WITHOUT_KEY or settings.get("api_key"):
        return
    server = environment.get("WANDB_BASE_URL") or settings.get("base_url") or WANDB_SERVER
    host = urlsplit(server).hostname or server
    if _is_in_netrc(host, environment):
        return
    raise UserError(
        "E-TRACK-008",
        "track.to: wandb has no API key",
        why=f"WANDB_API_KEY is not set, and the netrc file has no entry for {host}",
        fix="set WANDB_API_KEY or run `wandb login`; WANDB_MODE=offline records the run without a server",
    )


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of wandb's settings files, which `wandb login --host` and `wandb offline` write."""
    home = Path(environment.get("WANDB_CONFIG_DIR") or Path("~/.config/wandb").expanduser())
    read = configparser.ConfigParser(interpolation=None)
    try:
        read.read([home / "settings", Path(environment.get("WANDB_DIR") or ".") / "wandb" / "settings"])
        return dict(read["default"]) if "default" in read else {}
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}


def _is_in_netrc(host: str, environment: Mapping[str, str]) -> bool:
    named = environment.get("NETRC")
    paths = [Path(named).expanduser()] if named else [Path(f"~/{name}").expanduser() for name in (".netrc", "_netrc")]
    for path in paths:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
    return False
