"""Base class and helpers for the sections of a job. Each field has a description and a reason for its default."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from forerun.config.addresses import check_addresses, check_protocol

AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
# A single text means a tuple with this text.
AS_TEXTS = BeforeValidator(
    lambda value: (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
)
Texts = Annotated[tuple[str, ...], AS_TUPLE]


def is_class_path(name: str) -> bool:
    """Return whether a name has the form `module.path:Class`."""
    module, colon, class_name = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), class_name))


def about(
    description: str, reason: str, default: Any = ..., *, editors: dict[str, Any] | None = None, **limits: Any
) -> Any:
    """Return a pydantic field.

    Args:
      description: what the key is.
      reason: why the default is what it is.
      default: the default value. Without it, the key is required.
      editors: entries for the JSON Schema, for limits that a validator checks with its own message.
      **limits: limits that pydantic checks.
    """
    return Field(default, description=description, json_schema_extra={"reason": reason, **(editors or {})}, **limits)


class Section(BaseModel):
    """A section of a job: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @field_validator("*")
    @classmethod
    def _allowed_addresses(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise for credentials in any key, and for protocols that a key does not allow."""
        name = cls.__name__.lower().replace("part", "data.mixture")
        section = "" if name == "job" else f"{name}."
        check_addresses(value, f"{section}{info.field_name}")
        check_protocol(value, f"{section}{info.field_name}")
        return value


def shorthand(field: str) -> Any:
    """Return a validator that turns a text into a section: `model: qwen3-0.6b` means `model: {name: qwen3-0.6b}`."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)
