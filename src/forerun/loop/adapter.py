"""A run's adapters as a PEFT folder, and a PEFT folder as the first adapters of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.exchange import documents
from forerun.exchange.adapter import (
    CONFIG,
    TENSORS,
    Halves,
    Slot,
    adapters_of,
    config_json,
    differences,
    from_peft,
    slots_of,
    to_peft,
)
from forerun.exchange.shards import write_file
from forerun.hub.documents import read_json
from forerun.hub.weights import open_weights
from forerun.methods.names import family_named
from forerun.models.families.base import Family
from forerun.nn.lowrank import LowRank
from forerun.nn.spec import Tree


def write_adapter(folder: Path, params: Tree, job: Job, family: Family, model: Any, base: str | None) -> int:
    """adapter_config.json and adapter_model.safetensors, read back and compared; the number of tensors."""
    assert job.lora is not None
    found = adapters_of(params)
    slots = slots_of(family.table, model, found)
    tensors = to_peft({path: Halves(*jax.device_get(_halves(one))) for path, one in found.items()}, slots)
    write_file(folder / TENSORS, tensors)
    documents.write_json(folder / CONFIG, config_json(job.lora, slots, base))
    back = _tensors(folder)
    wrong = [name for name in tensors if name not in back or not np.array_equal(back[name], tensors[name])]
    if wrong or differences(read_json(folder / CONFIG), back, job.lora, slots):
        raise UserError(
            "the export was not proven: what was read back is not what was trained",
            why=f"{len(wrong)} of {len(tensors)} tensors differ; the folder was removed",
            fix="export again; if it fails again, please report it with this text",
        )
    return len(tensors)


def read_adapter(folder: Path, job: Job, model: Any, params: Tree) -> dict[str, dict[str, jax.Array]]:
    """Path of a weight -> the arrays of its adapter, in the shapes and places of `params`."""
    slots, tensors = require_adapter(folder, job, model, params)
    found = adapters_of(params)
    made = from_peft(tensors, slots, {path: _halves(one) for path, one in found.items()})
    return {path: _placed(made[path], one) for path, one in found.items()}


def require_adapter(
    folder: Path, job: Job, model: Any, params: Tree
) -> tuple[list[Slot], Mapping[str, np.ndarray[Any, Any]]]:
    """Return the places and tensors of a PEFT folder, if its adapters are those of the job. `params` may be shapes."""
    assert job.lora is not None
    family = family_named(job.model)
    if family is None:
        raise UserError(
            "lora.start: this model has no names that PEFT knows",
            why=f"{job.model.name or 'it'} has no Hugging Face form",
            fix="remove lora.start: adapters then begin as ones that change nothing",
        )
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise UserError(
                f"lora.start: {folder} is no PEFT folder",
                why=f"there is no {name} in it",
                fix="name a folder that PEFT's save_pretrained or forerun export has written",
            )
    found = adapters_of(params)
    slots = slots_of(family.table, model, found)
    config, tensors = read_json(folder / CONFIG), _tensors(folder)
    if different := differences(config, tensors, job.lora, slots):
        raise UserError(
            f"lora.start: the adapters in {folder} are not those of this job",
            why="; ".join(different),
            fix="change the lora section to what the folder has, or begin without lora.start",
        )
    return slots, tensors


def _halves(adapter: LowRank[Any]) -> Halves:
    return Halves(adapter.down, adapter.up, adapter.length)


def _placed(halves: Halves, wanted: LowRank[Any]) -> dict[str, jax.Array]:
    """On every host its own shards."""

    def placed(array: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        cast = array.astype(like.dtype)
        return jax.make_array_from_callback(cast.shape, like.sharding, lambda index: cast[index])

    both = zip(halves._asdict().items(), _halves(wanted), strict=True)
    return {name: placed(array, like) for (name, array), like in both if array is not None}


def _tensors(folder: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    with open_weights(folder, only=TENSORS) as weights:
        return {name: np.array(weights.view(name)) for name in weights}
