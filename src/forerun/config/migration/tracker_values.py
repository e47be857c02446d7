"""Conversions of the keys that select trackers and name their projects.

A trainer may have one key for each tracker. The setting `track.to` has all of them, so each conversion returns the
trackers of the complete configuration.
"""

from __future__ import annotations

from typing import Any

from forerun.config.migration.acceptance import accepts
from forerun.config.migration.conversion import (
    Conversion,
    Convert,
    ForeignValues,
    converted,
    flag_in,
    unneeded,
    unsupported,
)
from forerun.config.track import KNOWN

LISTS = "report_to log_with loggers"
SWITCHES = {
    "tensorboard": "use_tensorboard enable_tensorboard",
    "mlflow": "use_mlflow",
    "wandb": "wandb use_wandb wandb_project",
    "trackio": "use_trackio trackio_project_name",
}


def tracker(value: Any, given: ForeignValues) -> Conversion:
    """Convert the list of trackers."""
    names = _names(value)
    if not names:
        return unneeded("metrics.jsonl is always written")
    known = [name for name in names if accepts({"track.to": [name]})]
    lost = ", ".join(name for name in names if name not in known)
    reason = f"forerun has no tracker {lost[:60]}; track.to takes {', '.join(KNOWN)} or module.path:Class"
    if not known:
        return unsupported(reason)
    return converted("", reason if lost else "", track__to=_all(known, given))


def own_tracker(name: str) -> Convert:
    """Return a conversion of a switch that selects a tracker."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        return unneeded("it is off") if flag_in(value) is False else tracker(name, given)

    return convert


def project(name: str) -> Convert:
    """Return a conversion of the name of a project, which selects a tracker."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        selected = tracker(name, given)
        return Conversion({**selected.settings, "track.project": str(value)}, selected.note)

    return convert


def wandb_mode(value: Any, given: ForeignValues) -> Conversion:
    """Convert the mode of wandb, which is not part of a job."""
    return unneeded(f"the client reads it from the environment: WANDB_MODE={str(value)[:20]}")


def _names(value: Any) -> list[str]:
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    return [name for name in names if name not in ("none", "")]


def _all(first: list[str], given: ForeignValues) -> list[str]:
    """Return `first` and all other trackers of the configuration that forerun has."""
    listed = [name for key in LISTS.split() for name in _names(given.values.get(key) or []) if name in KNOWN]
    switched = [
        name
        for name, keys in SWITCHES.items()
        for value in [given.first(keys)]
        if value is not None and flag_in(value) is not False
    ]
    return sorted({*first, *listed, *switched}, key=[*KNOWN, *first].index)
