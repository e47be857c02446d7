"""The `targets` of a method: a word for all matrices, or names of weights."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

ALL_LINEAR = "all-linear"
TARGETS = "'all-linear', or names of weights, which may have wildcards: query, q_proj, blocks.*"


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Targets = Annotated[str | tuple[str, ...], BeforeValidator(_listed)]


def patterns_of(targets: Targets) -> tuple[str, ...]:
    return (targets,) if isinstance(targets, str) else targets
