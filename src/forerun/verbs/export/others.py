"""The parts of a multimodal checkpoint beside its text model, which an export keeps byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.errors import UserError
from forerun.hub.safetensors import Weights
from forerun.hub.snapshot import Snapshot, snapshot
from forerun.verbs.export.card import public_name
from forerun.weights_io.other_tensors import first_difference, open_others


@contextmanager
def copied_tensors(base: Snapshot | None) -> Iterator[Weights | None]:
    """Open the tensors of the base that the run did not train, and yield them, or None if it has only text."""
    if base is None:
        yield None
        return
    with open_others(base) as others:
        yield others


def compared_others(folder: Path, base: Snapshot, others: Weights) -> str:
    """Return a sentence about the tensors that an export copied.

    Raises:
      UserError: a copied tensor is not that of the base.
    """
    with open_others(snapshot(str(folder.absolute()))) as written:
        assert written is not None, "the export has the config.json of a multimodal model"
        name = first_difference(others, written)
    if name is not None:
        raise UserError(
            "E-WEIGHTS-031",
            f"the export was not proven: {name} is not that of {base.name}",
            why="tensors beside the text model must be copied byte for byte; the folder was removed",
            fix="make sure that no other process writes to the base model, then export again",
        )
    return f" The {len(others)} tensors beside the text model are byte for byte those of {public_name(base.name)}."
