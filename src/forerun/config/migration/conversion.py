"""The result of converting one key of another trainer, and functions that build the usual conversions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from forerun.config.schema import Job

Outcome = Literal["converted", "unneeded", "unsupported", "impossible"]


@dataclass(frozen=True)
class Conversion:
    """What a key of another trainer means in a job.

    Args:
      settings: keys of a job, such as `optimizer.lr`, with their values.
      note: an explanation for the user.
      outcome: converted; unneeded: forerun does this anyway; unsupported: forerun cannot do this, and trains without
        it; impossible: without it the job would train something else.
      lost: the part of the value that the settings do not contain, or "".
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    outcome: Outcome = "converted"
    lost: str = ""


@dataclass(frozen=True)
class ForeignValues:
    """All values of a foreign configuration, because the meaning of one key may depend on others.

    Args:
      values: the values by plain name: lower case, with underscores.
      devices: the number of devices, or None if it is unknown.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    devices: int | None = None

    def first(self, names: str) -> Any:
        """Return the first value that is set among several names, separated by blanks, or None."""
        return next((self.values[name] for name in names.split() if self.values.get(name) is not None), None)

    def number(self, names: str) -> float | None:
        """Return the first value that is set, as a number, or None."""
        return number_in(self.first(names))


Convert = Callable[[Any, ForeignValues], Conversion]


@dataclass(frozen=True)
class ForeignKey:
    """Names of one key in other trainers.

    Args:
      names: the names, separated by blanks. A name with a dot is a key of a section.
      tools: the trainers that use them.
      key: the key of a job that is meant, or "" if there is none.
      convert: the function that converts a value.
      example: a value for the documentation and the tests.
    """

    names: str
    tools: str
    key: str
    convert: Convert
    example: Any


def plain_name(name: str) -> str:
    """Return a key or an option such as --Learning-Rate as a plain name: learning_rate."""
    return name.lstrip("-").replace("-", "_").lower()


def converted(note: str = "", lost: str = "", /, **settings: Any) -> Conversion:
    """Return a conversion to settings. Two underscores in a name stand for a dot."""
    return Conversion({key.replace("__", "."): value for key, value in settings.items()}, note, lost=lost)


def to(key: str, value: Any, note: str = "") -> Conversion:
    """Return a conversion to one setting."""
    return Conversion({key: value}, note)


def unneeded(reason: str) -> Conversion:
    return Conversion(note=reason, outcome="unneeded")


def unsupported(reason: str) -> Conversion:
    return Conversion(note=reason, outcome="unsupported")


def impossible(reason: str) -> Conversion:
    return Conversion(note=reason, outcome="impossible")


def number_in(value: Any) -> float | None:
    """Return a value as a number, or None. Many YAML parsers read `2e-5` as a text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", value, re.IGNORECASE):
        return float(value)
    return None


def whole_in(value: Any) -> int | None:
    """Return a value as a whole number, or None."""
    number = number_in(value)
    return int(number) if number is not None and abs(number) < 1e15 and number == int(number) else None


def flag_in(value: Any) -> bool | None:
    """Return a value as true or false, or None. YAML 1.1 reads `yes` and `on` as true."""
    if isinstance(value, bool):
        return value
    return {
        "true": True,
        "yes": True,
        "on": True,
        "1": True,
        "false": False,
        "no": False,
        "off": False,
        "0": False,
    }.get(str(value).lower())


def same(key: str, note: str = "") -> Convert:
    """Return a conversion that keeps the value."""
    return lambda value, _: to(key, value, note)


def text(key: str, note: str = "") -> Convert:
    """Return a conversion of a text."""
    return lambda value, _: to(key, str(value), note)


def number(key: str, note: str = "") -> Convert:
    """Return a conversion of a number, which may be written as a text."""

    def convert(value: Any, _: ForeignValues) -> Conversion:
        found = number_in(value)
        return unsupported("this is not a number") if found is None else to(key, found, note)

    return convert


def whole(key: str, note: str = "") -> Convert:
    """Return a conversion of a whole number."""

    def convert(value: Any, _: ForeignValues) -> Conversion:
        found = whole_in(value)
        return unsupported("this is not a whole number") if found is None else to(key, found, note)

    return convert


def steps(key: str) -> Convert:
    """Return a conversion of a number of steps. 0 and negative numbers mean that the key is not set."""

    def convert(value: Any, _: ForeignValues) -> Conversion:
        found = whole_in(value)
        if found is None:
            return unsupported(f"{key} counts steps, and this is not a whole number")
        return to(key, found) if found > 0 else unneeded("it is not set")

    return convert


def flag(key: str, true: Any, false: Any, note: str = "") -> Convert:
    """Return a conversion of true and false to two values of a key. The value None means that no key is needed."""

    def convert(value: Any, _: ForeignValues) -> Conversion:
        found = flag_in(value)
        if found is None:
            return unsupported("this is neither true nor false")
        wanted = true if found else false
        return unneeded(note or "it is off in forerun, too") if wanted is None else to(key, wanted, note)

    return convert


def nothing(reason: str) -> Convert:
    """Return a conversion of a key that forerun does not need."""
    return lambda value, _: unneeded(reason)


def missing(reason: str, harmless: tuple[Any, ...] = (False, 0, "", "none", "no")) -> Convert:
    """Return a conversion of a key that forerun does not have. Values that turn it off are not needed."""

    def convert(value: Any, _: ForeignValues) -> Conversion:
        is_off = value in harmless or (isinstance(value, list | dict) and not value)
        return unneeded("it is off") if is_off else unsupported(reason)

    return convert


# ---- Whether the schema of a job accepts converted settings ----


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
