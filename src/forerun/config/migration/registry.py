"""All names of other trainers, and the conversion of one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from forerun.config.migration import method_values, model_names, training_names, unneeded_names
from forerun.config.migration.acceptance import accepts
from forerun.config.migration.conversion import Conversion, ForeignKey, ForeignValues, plain_name, unneeded, unsupported

# Names that are a section in some trainers and a value in others.
_SECTIONS = ("optimizer", "lr_scheduler", "spawn")
GROUPS: Mapping[str, tuple[ForeignKey, ...]] = {
    "Batch and length": training_names.BATCH,
    "Optimizer": training_names.OPTIMIZER,
    "Precision and memory": training_names.PRECISION,
    "Devices": training_names.DEVICE,
    "Run": training_names.RUN,
    "Model": model_names.MODEL,
    "Data": model_names.DATA,
    "Methods": model_names.METHODS,
    "Not needed": unneeded_names.UNNEEDED,
    "Not available": unneeded_names.MISSING,
}


@cache
def names() -> dict[str, ForeignKey]:
    """Return all names with their keys."""
    return {name: key for group in GROUPS.values() for key in group for name in key.names.split()}


def foreign_key(path: str) -> ForeignKey | None:
    """Return the entry of a name such as `learning_rate`, `training.seq_len` or `--learning-rate`, or None."""
    plain = plain_name(path)
    return names().get(plain) or names().get(plain.rpartition(".")[2])


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted name and its value. A section is entered if no trainer has a key of its name."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and (foreign_key(path) is None or plain_name(name) in _SECTIONS):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def surroundings(tree: Mapping[str, Any], devices: int | None = None) -> ForeignValues:
    """Return all values of a configuration by their plain names, without sections."""
    return ForeignValues({plain_name(path.rpartition(".")[2]): value for path, value in leaves(tree)}, devices)


def convert_value(path: str, value: Any, given: ForeignValues) -> Conversion | None:
    """Return what a key of another trainer means, or None for an unknown name.

    The schema accepts the settings of the result: a value that it rejects is unsupported.
    """
    key = foreign_key(path)
    if key is None:
        return None
    if value is None or value == "":
        return unneeded("it is not set")
    found = key.convert(value, given)
    if any(name.startswith("lora.") for name in found.settings) and _is_without_adapter(given):
        return unneeded(method_values.NO_LORA)
    if found.outcome == "converted" and not accepts(found.settings):
        return unsupported(f"{' or '.join(found.settings)} does not accept this value")
    return replace(found, settings=dict(found.settings))


def _is_without_adapter(given: ForeignValues) -> bool:
    """Return whether a configuration has a switch for adapters that is off."""
    return bool({"adapter", "use_peft"} & set(given.values)) and not method_values.uses_adapter(given)
