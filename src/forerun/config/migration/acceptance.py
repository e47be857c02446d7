"""Whether the schema of a job accepts converted settings. New keys and choices are then used without other changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from forerun.config.schema import Job


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as the nested sections of a job."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        target = tree
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return tree


def accepts(settings: Mapping[str, Any]) -> bool:
    """Return whether a job may have these settings."""
    required = {"model.name": "model", "data.validation": 0.1}
    if not any(key.startswith("data.mixture") for key in settings):
        required["data.path"] = "texts"
    try:
        Job.model_validate(nested({**required, **settings}))
    except ValidationError:
        return False
    return True


def first_accepted(key: str, values: tuple[Any, ...]) -> Any:
    """Return the first of several values that a key accepts, or None."""
    return next((value for value in values if accepts({key: value})), None)
