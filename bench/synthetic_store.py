"""A token store of any size for benchmarks: one real unit, and an index that lists it under many names.

The unit is written by forerun's own writer, so all its checksums are right. `range_server.py` serves it under each name
of the index. Readers therefore see a store of `units` times its size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from forerun.data import checked_json
from forerun.data.tokens.document import Encoded
from forerun.data.tokens.recipe import FORMAT
from forerun.data.tokens.store import INDEX, index_entry
from forerun.data.tokens.unit import Unit, UnitWriter

VOCAB = 128_256  # above 65,536: four bytes per token
DOCUMENT_TOKENS = (30, 2000)
CHUNK_DOCUMENTS = 4096


def write_unit(folder: Path, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Write one unit with about this number of random tokens to `folder`, and return its summary."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(seed)
    writer = UnitWriter(folder, Unit(0, 1, (), 4 * tokens), VOCAB)
    while writer.tokens < tokens:
        lengths = chance.integers(*DOCUMENT_TOKENS, CHUNK_DOCUMENTS)
        ids = chance.integers(0, VOCAB, int(lengths.sum()), dtype=np.int32)
        documents = np.split(ids, np.cumsum(lengths)[:-1])
        writer.add("train", [Encoded(document, None) for document in documents])
    return writer.finish()


def write_index(folder: Path, summary: dict[str, Any], units: int) -> int:
    """Write an index of `units` units that all have the content of `summary`. Return its size in bytes."""
    entry = index_entry(summary)
    recipe = {"tokenizer_digest": "synthetic", "eos": 0, "vocab": VOCAB, "format": FORMAT}
    entries = [entry | {"unit": number, "of": units} for number in range(units)]
    content = checked_json.encode({"format": FORMAT, "recipe": recipe, "source": "synthetic", "units": entries})
    (folder / INDEX).write_bytes(content)
    return len(content)
