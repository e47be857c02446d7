"""PEFT folders: write the adapters of a run, and read the initial adapters of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hub.documents import read_json
from forerun.hub.safetensors import open_weights
from forerun.models.families.base import Family
from forerun.nn.spec import Tree
from forerun.nn.weights.lowrank import LowRank
from forerun.resolve.resolved_job import ResolvedJob
from forerun.weights_io import documents
from forerun.weights_io.adapter import (
    CONFIG,
    TENSORS,
    AdapterArrays,
    Slot,
    adapters_of,
    config_json,
    differences,
    from_peft,
    new_rows_of,
    rows_config,
    rows_to_peft,
    slots_of,
    to_peft,
)
from forerun.weights_io.shards import write_file


def write_adapter(folder: Path, params: Tree, job: Job, family: Family, model: Any, base: str | None) -> int:
    """Write adapter_config.json and adapter_model.safetensors. Return the number of tensors.

    Args:
      params: the parameters with their adapters.
      family: names the tensors.
      base: the name of the base model for adapter_config.json, or None.

    Raises:
      UserError: the files that were read back differ from the adapters.
    """
    settings = job.method.adapter
    assert settings is not None
    found = adapters_of(params)
    slots = slots_of(family.modules, model, found)
    adapters = to_peft({path: AdapterArrays(*jax.device_get(_halves(one))) for path, one in found.items()}, slots)
    extended = new_rows_of(params)
    rows = {path: np.asarray(jax.device_get(one.rows)) for path, one in extended.items()}
    tensors = adapters | rows_to_peft(rows, family.modules)
    write_file(folder / TENSORS, tensors)
    config = config_json(settings, slots, base)
    first = {path: one.first for path, one in extended.items()}
    documents.write_json(folder / CONFIG, config | rows_config(first, rows, family.modules))
    back = _tensors(folder)
    wrong = [name for name in tensors if name not in back or not np.array_equal(back[name], tensors[name])]
    if wrong or differences(config, {name: back[name] for name in adapters}, settings, slots):
        raise UserError(
            "E-RUN-001",
            "the export was not proven: what was read back is not what was trained",
            why=f"{len(wrong)} of {len(tensors)} tensors differ; the folder was removed",
            fix="export again; if it fails again, please report it with this text",
        )
    return len(tensors)


def read_adapter(folder: Path, resolved: ResolvedJob, params: Tree) -> dict[str, dict[str, jax.Array]]:
    """Return the arrays of the adapters in a PEFT folder, by the path of their weight.

    They have the shapes, dtypes and shardings of the adapters in `params`.
    """
    slots, tensors = require_adapter(folder, resolved, params)
    found = adapters_of(params)
    made = from_peft(tensors, slots, {path: _halves(one) for path, one in found.items()})
    return {path: _placed(made[path], one) for path, one in found.items()}


def require_adapter(
    folder: Path, resolved: ResolvedJob, params: Tree
) -> tuple[list[Slot], Mapping[str, np.ndarray[Any, Any]]]:
    """Return the slots and tensors of a PEFT folder. Raise if its adapters are not those of the job.

    `params` may be abstract.
    """
    job, family = resolved.job, resolved.model_facts.family
    settings = job.method.adapter
    assert settings is not None
    if family is None:
        raise UserError(
            "E-RUN-002",
            "lora.start: this model has no names that PEFT knows",
            why=f"{job.model.name or 'it'} has no Hugging Face form",
            fix="remove lora.start: new adapters do not change the model at first",
        )
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise UserError(
                "E-RUN-003",
                f"lora.start: {folder} is not a PEFT folder",
                why=f"it does not contain {name}",
                fix="name a folder that PEFT's save_pretrained or forerun export has written",
            )
    model: Any = resolved.model  # a built-in model, because it has a family
    slots = slots_of(family.modules, model, adapters_of(params))
    config, tensors = read_json(folder / CONFIG), _tensors(folder)
    if different := differences(config, tensors, settings, slots):
        raise UserError(
            "E-RUN-004",
            f"lora.start: the adapters in {folder} do not match this job",
            why="; ".join(different),
            fix="change the lora section to match the folder, or remove lora.start",
        )
    return slots, tensors


def _halves(adapter: LowRank[Any]) -> AdapterArrays:
    return AdapterArrays(adapter.down, adapter.up, adapter.length)


def _placed(halves: AdapterArrays, wanted: LowRank[Any]) -> dict[str, jax.Array]:
    """Return the arrays on the devices. Each host places only its own shards."""

    def placed(array: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        cast = array.astype(like.dtype)
        return jax.make_array_from_callback(cast.shape, like.sharding, lambda index: cast[index])

    both = zip(halves._asdict().items(), _halves(wanted), strict=True)
    return {name: placed(array, like) for (name, array), like in both if array is not None}


def _tensors(folder: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    with open_weights(folder, only=TENSORS) as weights:
        return {name: np.array(weights.view(name)) for name in weights}
