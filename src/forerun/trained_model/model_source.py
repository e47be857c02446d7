"""The SOURCE argument of `generate`, `chat` and `eval`: a run's folder, a checkpoint's folder, or a name on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config.schema import Model
from forerun.errors import UserError, did_you_mean
from forerun.hub import names
from forerun.hub.snapshot import CONFIG_NAME, Snapshot, snapshot
from forerun.models.families.registry import CUSTOM_MODEL
from forerun.models.model_facts import ModelFacts
from forerun.reporter import SILENT, Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.run_folder import RunFolder, job_of_run
from forerun.run_folder.stage_folder import STAGES, run_of
from forerun.weights_io.read import read_tree

SECTION = "forerun"  # the key in config.json with the class, its options and its files


@dataclass(frozen=True)
class ModelSource:
    """A model source: a run with its job, or a checkpoint without a job.

    Attributes:
      folder: the folder of the run. It is not used for a checkpoint.
      resolved: the job of the run, or None for a checkpoint.
      facts: the facts about the model.
      custom: the exported folder of a custom model class, or None.
    """

    folder: RunFolder
    resolved: ResolvedJob | None
    facts: ModelFacts
    custom: CustomExport | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """The files of the checkpoint or of the exported class, or None for a run from random weights."""
        return self.facts.snapshot if self.custom is None else self.custom.snapshot


def model_source(source: str, revision: str | None = None, reporter: Reporter = SILENT) -> ModelSource:
    """Return the run or the checkpoint that `source` names.

    The folder of a job file with stages means the run of its last stage. A damaged `job.yaml` of a run is reported.

    Raises:
      UserError: there is no such run or checkpoint.
    """
    folder = RunFolder(run_of(source))
    job = job_of_run(folder, reporter)
    if job is None:
        section = checkpoint_section(source, revision)
        custom = custom_export(section)
        return ModelSource(folder, None, ModelFacts(custom.section if custom else section), custom)
    resolved = ResolvedJob(job)
    return ModelSource(folder, resolved, resolved.model_facts)


def checkpoint_section(source: str, revision: str | None = None) -> Model:
    """Return the model section of a source that is not a run: a checkpoint's folder or a name on the hub.

    `runs/name` also has the form of a hub name. If the folder contains runs, or is called `runs`, it means a run. If
    that run does not exist, this is an error.
    """
    name = f"./{source}" if "/" not in source and Path(source).is_dir() else source
    path = Path(source)
    beside = _runs_beside(path)
    if (beside or path.parent == Path("runs")) and not names.is_folder(name):
        near = did_you_mean(path.name, beside)
        raise UserError(
            "E-RUN-033",
            f"there is no run {source}",
            why=f"runs in {path.parent}: {', '.join(beside[:10])}" if beside else f"{path.parent} contains no run",
            fix=f"did you mean {path.parent / near}?" if near else "name a run, a checkpoint's folder or a hub name",
        )
    if names.kind_of(name) not in ("repository", "folder"):
        raise UserError(
            "E-RUN-034",
            f"{source} is neither a run nor a checkpoint",
            why="it has no job.yaml (a run of forerun) and no config.json (a Hugging Face folder)",
            fix="give a folder under runs/, a checkpoint's folder, or a name on the hub such as owner/name",
        )
    return Model(name=name, revision=revision)


def _runs_beside(path: Path) -> list[str]:
    """Return the names of the runs in the folder that would contain `path`."""
    if path.parent in (Path(), Path("/")):
        return []
    try:
        return sorted({file.parent.name for name in ("job.yaml", STAGES) for file in path.parent.glob(f"*/{name}")})
    except OSError:
        return []


# ---- The exported folder of a custom model class ----


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
