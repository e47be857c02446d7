"""The folder of stored results. This module imports nothing else, so that a command can look there first."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Return the folder of stored results: `forerun/verdicts` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun" / "verdicts"
