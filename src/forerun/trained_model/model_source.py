"""The SOURCE argument of `generate`, `chat` and `eval`: a run's folder, a checkpoint's folder, or a name on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.config.schema import Model
from forerun.errors import UserError, did_you_mean
from forerun.hub import names
from forerun.hub.snapshot import Snapshot
from forerun.models.model_facts import ModelFacts
from forerun.reporter import SILENT, Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.run_folder import RunFolder, job_of_run
from forerun.run_folder.stage_folder import STAGES, run_of
from forerun.trained_model.custom_export import CustomExport, custom_export


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
