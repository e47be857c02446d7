"""The key of Weights & Biases. forerun never reads it; it only checks that the client finds one."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from forerun.errors import UserError

SERVER = "https://api.wandb.ai"
WITHOUT_KEY = ("offline", "dryrun", "disabled")


def require_login(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if the client would ask for a key. A run has no terminal in which to answer."""
    if environment.get("WANDB_MODE", "online") in WITHOUT_KEY:
        return
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    settings = _settings(environment)
    if settings.get("mode") in WITHOUT_KEY or settings.get("api_key"):
        return
    server = environment.get("WANDB_BASE_URL") or settings.get("base_url") or SERVER
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
