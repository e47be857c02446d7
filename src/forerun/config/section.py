"""What sections of the job are made of: strict, frozen, and every field with its meaning and its reason."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from forerun.config.addresses import check_addresses
from forerun.config.protocols import check_protocol


def about(
    description: str, reason: str, default: Any = ..., *, editors: dict[str, Any] | None = None, **limits: Any
) -> Any:
    """A field with its meaning and the reason for its default. `editors`: a limit that a validator checks in its
    own words, as JSON Schema says it."""
    return Field(default, description=description, json_schema_extra={"reason": reason, **(editors or {})}, **limits)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @field_validator("*")
    @classmethod
    def _allowed_addresses(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject credentials in every key of every section, and protocols that a key does not allow."""
        name = cls.__name__.lower().replace("part", "data.mixture")
        section = "" if name == "job" else f"{name}."
        check_addresses(value, f"{section}{info.field_name}")
        check_protocol(value, f"{section}{info.field_name}")
        return value


def shorthand(field: str) -> Any:
    """`model: qwen3-0.6b` means `model: {name: qwen3-0.6b}`."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)
