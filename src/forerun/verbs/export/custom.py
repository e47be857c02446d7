"""The files of an exported custom class: weights, config.json, copies of the source files, and how to load them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from forerun.errors import UserError
from forerun.files import atomic_write, read_regular
from forerun.hub.documents import read_json
from forerun.hub.safetensors import numpy_dtype, open_weights
from forerun.models.keys import path_text
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.model_code import CODE_FOLDER, changed_code, source_files
from forerun.run_folder.run_folder import RunFolder
from forerun.trained_model.model_source import SECTION, config_of_class
from forerun.units import MIB
from forerun.weights_io import documents
from forerun.weights_io.write import tensor_dtype, write_tree

NOTICE = """\
These files are a copy of the model's source code when the weights were exported. The SHA-256 of each file is in
config.json. They are data: forerun never imports them from here unless you name this folder with --code. Read them
first, because code that is imported can do anything that you can do.
"""


def write_custom(
    folder: Path, run: RunFolder, resolved: ResolvedJob, params: Any, dtype: str, chat_end: int | None
) -> str:
    """Write weights, config.json and source files of a run with a custom class. Return what was proven.

    The class must be importable (`use_code_of`).

    Args:
      folder: the folder of the export.
      run: the run.
      resolved: its job.
      params: the trained weights in the structure of the model's specs.
      dtype: the dtype of the written weights.
      chat_end: the id of the token that ends a turn, or None.

    Raises:
      UserError: the files differ from the trained weights when they are read back.
    """
    job = resolved.job
    write_tree(folder, params, dtype)
    sources = source_files(job)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sources.items()}
    for name, content in sources.items():
        (folder / CODE_FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / CODE_FOLDER / name, content)
    if sources:
        atomic_write(folder / CODE_FOLDER / "NOTICE.txt", NOTICE)
    config = config_of_class(job.model, digests, changed_code(run, job), dtype, job.sequence)
    ends = {} if chat_end is None else {"eos_token_id": chat_end}
    documents.write_json(folder / "config.json", config | ends)
    return _proof(folder, params, dtype)


def _proof(folder: Path, params: Any, dtype: str) -> str:
    """Read all tensors back and compare them with the trained ones. Return a sentence about the result."""
    leaves = {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    with open_weights(folder) as weights:
        for name, leaf in leaves.items():
            expected = np.asarray(leaf).astype(numpy_dtype(tensor_dtype(dtype, name)))
            if name not in weights or weights.view(name).tobytes() != expected.tobytes():
                raise UserError(
                    "E-MODEL-033",
                    f"the export was not proven: {name} is not what was trained",
                    why="what was written is read back and compared before it counts; the folder was removed",
                    fix="export again; if it fails again, please report it with this text",
                )
    exact = all(str(leaf.dtype) == dtype for leaf in leaves.values())
    return (
        f"Read back from disk: all {len(leaves)} tensors are those of the trained state"
        f"{', bit for bit' if exact else f', rounded to {dtype}'}."
    )


def add_usage(folder: Path, resolved: ResolvedJob, target: str) -> None:
    """Append to the model card how to load the weights with forerun and with plain JAX."""
    section = resolved.job.model
    module, _, name = str(section.name).partition(":")
    has_code = (folder / CODE_FOLDER).is_dir()
    place = CODE_FOLDER if has_code else "the package's folder"
    origin = (
        f"`{CODE_FOLDER}/` is a copy of the class's source files. forerun never imports it on its own."
        if has_code
        else f"The class is in the installed package `{module.partition('.')[0]}`, which is not part of this folder."
    )
    changed = changed_note(folder)
    text = f"""
## Use

The model is the custom class `{section.name}`, which transformers cannot load. {origin}{changed}
Read the code before you use it, then name its folder:

```sh
forerun generate {target} "Once upon a time" --code {target}/{place}
```

With JAX, the safetensors library and the installed package forerun, whose layers the class uses:

```python
import sys

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file

from forerun.nn.compute import Compute
from forerun.nn.spec import is_spec

sys.path.insert(0, "{place}")
from {module} import {name}

model = {name}(vocab={section.vocab}, **{section.options!r})
tensors = load_file("model.safetensors")


def array(path, spec):
    return jnp.asarray(tensors[jax.tree_util.keystr(path, simple=True, separator=".")], jnp.float32)


params = jax.tree_util.tree_map_with_path(array, model.specs(), is_leaf=is_spec)
tokens = jnp.asarray([[65, 108, 105, 99, 101]], jnp.int32)
positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
logits = model.apply(params, tokens, jnp.ones_like(tokens), positions, Compute()).logits()
print(logits.argmax(-1))
```
"""
    before = read_regular(folder / "README.md", MIB).decode()
    atomic_write(folder / "README.md", before + text)


def changed_note(folder: Path) -> str:
    """Return a sentence that names the files that changed since the training began, or ""."""
    changed = read_json(folder / "config.json")[SECTION]["changed_since_training"]
    return f" These files changed after the training began: {', '.join(changed)}." if changed else ""
