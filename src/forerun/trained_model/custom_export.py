"""The exported folder of a custom model class: its weights, its class and options, and digests of its source files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.config.schema import Model
from forerun.errors import UserError
from forerun.hub import names
from forerun.hub.snapshot import CONFIG_NAME, Snapshot, snapshot
from forerun.models.families.registry import CUSTOM_MODEL
from forerun.weights_io.read import read_tree

SECTION = "forerun"  # the key in config.json with the class, its options and its files


@dataclass(frozen=True)
class CustomExport:
    """An exported custom class.

    Attributes:
      snapshot: the files of the folder.
      section: the model section of a job with the class, its options and the vocabulary.
      files: the SHA-256 of each source file, by its path.
    """

    snapshot: Snapshot
    section: Model
    files: Mapping[str, str]

    def params(self, wanted: Any) -> Any:
        """Return the weights on the devices. `wanted` has their shapes, dtypes and shardings."""
        with snapshot(self.snapshot.name).open_weights() as weights:
            return read_tree(weights, wanted, str(self.snapshot.folder))


def config_of_class(section: Model, files: Mapping[str, str], changed: list[str], dtype: str, sequence: int) -> Any:
    """Return the config.json of an exported class.

    Args:
      section: the model section of the run's job.
      files: the SHA-256 of each source file, by its path.
      changed: the files that changed after the training began.
      dtype: the dtype of the weights.
      sequence: the length of the sequences in training.
    """
    own = {"class": section.name, "options": section.options, "files": dict(files), "changed_since_training": changed}
    return {
        "model_type": CUSTOM_MODEL,
        "architectures": [str(section.name).partition(":")[2]],
        "vocab_size": section.vocab,
        "max_position_embeddings": sequence,
        "dtype": dtype,
        SECTION: own,
    }


def custom_export(section: Model) -> CustomExport | None:
    """Return the exported class in the folder that a section names, or None if it is another model.

    Raises:
      UserError: the config.json of an exported class is damaged.
    """
    if section.name is None or not names.is_folder(section.name):
        return None
    if not (names.folder_path(section.name) / CONFIG_NAME).is_file():
        return None
    found = snapshot(section.name, section.revision, weights=False)
    config = found.config()
    if config.get("model_type") != CUSTOM_MODEL:
        return None
    own, vocab = config.get(SECTION), config.get("vocab_size")
    name, options, files = (
        (own.get(key) for key in ("class", "options", "files")) if isinstance(own, dict) else [None] * 3
    )
    valid = isinstance(name, str) and names.is_plugin(name) and isinstance(vocab, int)
    if not valid or not isinstance(options, dict) or not isinstance(files, dict):
        raise UserError(
            "E-MODEL-032",
            f"{found.folder / CONFIG_NAME} does not describe a custom model class",
            why=f"its model_type is {CUSTOM_MODEL}, but the class, its options, its files or the vocabulary is invalid",
            fix="export the run again, or restore the file",
        )
    digests = {str(path): str(digest) for path, digest in files.items()}
    return CustomExport(found, Model(name=name, vocab=vocab, options=options), digests)
