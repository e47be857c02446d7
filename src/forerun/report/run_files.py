"""Validated content of the files of a run: summary.json, hosts.json and the lines of the .jsonl files.

The pages compute with these values, and another program may have written the files. A file with one object is
rejected if a value has a wrong type. Of a file with many lines, such lines are omitted, as broken ones are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forerun.errors import UserError
from forerun.journal import entry_of

Row = dict[str, Any]

_LARGEST = 1e300  # of a number of unknown meaning: sums and squares of others overflow in charts
_MAX_DEPTH = 20
Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, lt=2.0**63)]  # seconds, bytes, tokens per second
Value = Annotated[float, Field(gt=-_LARGEST, lt=_LARGEST)]
UnixSeconds = Annotated[float, Field(ge=0, lt=1e11)]  # until the year 5138


class _Content(BaseModel):
    """Known keys with their types. A missing value may be null."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Device(_Content):
    platform: str | None = None
    kind: str | None = None
    chip: str | None = None
    count: Count | None = None


class _Goodput(_Content):
    share: Value | None = None
    wall_seconds: Amount | None = None
    seconds: dict[str, Amount | None] | None = None


class _Summary(_Content):
    name: str | None = None
    steps: Count | None = None
    resumed_at: Count | None = None
    first_loss: Value | None = None
    final_loss: Value | None = None
    loss_unit: str | None = None
    tokens: Count | None = None
    parameters: Count | None = None
    trainable_parameters: Count | None = None
    step_seconds: Amount | None = None
    predicted_step_seconds: Amount | None = None
    tokens_per_second: Amount | None = None
    samples_per_second: Amount | None = None
    mfu: Amount | None = None
    epochs: Amount | None = None
    epoch_seconds: Amount | None = None
    hbm_peak_bytes: Amount | None = None
    wait_share: Amount | None = None
    train_seconds: Amount | None = None
    data_requests: Amount | None = None
    data_read_bytes: Amount | None = None
    data_cache_hits: Amount | None = None
    data_cache_misses: Amount | None = None
    data_damaged_blocks: Amount | None = None
    data_failed_requests: Amount | None = None
    device: _Device | None = None
    goodput: _Goodput | None = None
    versions: dict[str, str | None] | None = None


class _Host(_Content):
    name: str | None = None
    step: Count | None = None
    lag: Annotated[int, Field(gt=-(2**63), lt=2**63)] | None = None
    memory_bytes: Amount | None = None
    memory_limit_bytes: Amount | None = None
    age_seconds: Amount | None = None


class _Hosts(_Content):
    unix_seconds: UnixSeconds | None = None
    hosts: Sequence[_Host] | None = None


class _Line(_Content):
    """A line of a .jsonl file. All files of lines use these keys with the same types."""

    step: Count | None = None
    unix_seconds: UnixSeconds | None = None
    event: str | None = None
    bytes: Amount | None = None
    samples: list[dict[str, Any]] | None = None
    tokens_per_second: Amount | None = None
    step_seconds: Amount | None = None
    hbm_bytes: Amount | None = None
    hbm_peak_bytes: Amount | None = None
    data_requests: Amount | None = None
    data_read_bytes: Amount | None = None


class DamagedRunFile(UserError):
    """A file of a run has a value of a wrong type."""


def read_summary(path: Path) -> Row:
    """Return the content of summary.json. See `read_object`."""
    return _validated(path, _Summary)


def read_hosts(path: Path) -> Row:
    """Return the content of hosts.json. See `read_object`."""
    return _validated(path, _Hosts)


def read_object(path: Path) -> Row:
    """Return the JSON object of a file, or an empty one if the file is missing or broken."""
    try:
        return object_of(path.read_bytes())
    except OSError:
        return {}


def read_lines(path: Path) -> list[Row]:
    """Return the JSON objects of a file with one per line.

    Broken lines, lines with a value of a wrong type, and an incomplete last line are omitted.
    """
    try:
        *lines, _torn = path.read_bytes().split(b"\n")
    except OSError:
        return []
    return [row for line in lines if (row := line_of(line))]


def metrics_of(line: bytes) -> Row | None:
    """Return a line of metrics.jsonl, or None if it is broken, has no step, or has a value of a wrong type."""
    return row if entry_of(line) is not None and (row := line_of(line)) else None


def line_of(line: bytes) -> Row:
    """Return a line of a .jsonl file, or an empty row if it is broken or has a value of a wrong type."""
    row = object_of(line)
    return row if row and _problem(row, _Line) is None else {}


def object_of(content: bytes) -> Row:
    """Return the JSON object in `content`, or an empty one if there is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _validated(path: Path, model: type[_Content]) -> Row:
    """Return the JSON object of a file whose known keys have the types of `model`. It is empty for a missing file.

    Raises:
      DamagedRunFile: a value has a wrong type.
    """
    content = read_object(path)
    if problem := _problem(content, model):
        raise DamagedRunFile(
            "E-REPORT-003",
            f"{path} has a value that forerun did not write",
            why=problem,
            fix="restore the file, or move it away: the run is shown without it, and training does not read it",
        )
    return content


def _problem(content: Row, model: type[_Content]) -> str | None:
    """Return what is wrong with `content`, or None."""
    try:
        model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None if _is_bounded(content, _MAX_DEPTH) else "a number is not finite or too large, or the values are nested"


def _is_bounded(value: Any, depth: int) -> bool:
    """Return whether all numbers are finite and below `_LARGEST`, and lists and objects are nested at most `depth`."""
    if isinstance(value, dict | list):
        values = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_bounded(inner, depth - 1) for inner in values)
    return not isinstance(value, int | float) or -_LARGEST < value < _LARGEST
