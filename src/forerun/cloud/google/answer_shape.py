"""Shapes of the answers of Google's APIs. A shape is a TypedDict with the keys that forerun reads.

An answer of another shape counts as a failed call. Keys that a shape does not name may have any value.
"""

from __future__ import annotations

from functools import cache
from typing import (
    Annotated,
    Any,
    Required,  # pydantic needs this one before Python 3.12
)

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

# A name becomes part of paths.
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x20\x7f?#%]+$")]
Labels = dict[str, str]


class AnyAnswer(TypedDict, total=False):
    """A JSON object."""


class NamedResource(TypedDict, total=False):
    name: Required[Name]


class ErrorItem(TypedDict, total=False):
    code: str
    message: str
    reason: str


class OperationError(TypedDict, total=False):
    """The error of the Cloud TPU API (a code and a message) or of Compute Engine (a list of errors)."""

    code: int
    message: str
    details: list[dict[str, Any]]
    errors: list[ErrorItem]


class GuestAttribute(TypedDict, total=False):
    key: str
    value: str


class GuestItems(TypedDict, total=False):
    items: list[GuestAttribute]


class GuestAttributes(TypedDict, total=False):
    queryValue: GuestItems


def shape_problem(content: object, shape: Any) -> str:
    """Return why a JSON value does not have a shape, or an empty string if it has it."""
    try:
        _reader(shape).validate_python(content, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{'.'.join(map(str, problem['loc'])) or 'the answer'}: {problem['msg']}"[:300]
    except RecursionError:
        return "the answer is nested too deeply"
    return ""


@cache
def _reader(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)
