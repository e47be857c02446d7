"""A teacher with random weights, as a Hugging Face folder; its tokens are bytes."""

from __future__ import annotations

from pathlib import Path

import jax

from forerun.config import schema
from forerun.hardware.mesh import MeshShape
from forerun.models.families.registry import family_for
from forerun.models.model_facts import config_of, model_for
from forerun.nn.spec import initial
from forerun.program.build import make_mesh
from forerun.weights_io import documents
from forerun.weights_io.write import write_params


def write_teacher(folder: Path) -> None:
    section = schema.Model(layers=1, embed=24, heads=2, vocab=257)
    config = config_of(section)
    model, family = model_for(config), family_for(config)
    with jax.set_mesh(make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])):
        params = initial(model.specs(), jax.random.key(3))
    folder.mkdir()
    write_params(folder, jax.tree.map(lambda x: 8 * x, params), family.table, model, "F32")
    documents.write_json(folder / "config.json", documents.config_json(family, config, None, "F32", 256))
    documents.write_tokenizer(None, folder, 256)
