"""Which weights a method is for: a word for all of them, or names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

ALL_LINEAR = "all-linear"
TARGETS = "'all-linear', or names of weights: query, q_proj, blocks.*, each may have wildcards"


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Targets = Annotated[str | tuple[str, ...], BeforeValidator(_listed)]


def patterns_of(targets: Targets) -> tuple[str, ...]:
    return (targets,) if isinstance(targets, str) else targets
