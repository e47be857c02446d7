"""Jobs: load them from files, create files from recipes, and describe their keys."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun.errors import UserError
from forerun.verbs.option_types import Value

if TYPE_CHECKING:
    from forerun.config.load import LoadedJob
    from forerun.config.migration.foreign_file import ConvertedJob
    from forerun.config.schema import Job
    from forerun.config.stages import Stage

# The folder of each loaded job that names classes as `module.path:Class`, by the job's `id`. A Job does not know its
# file. A copy of a job with other values is another object, so the folders of each class are kept, too.
_folder_of_job: dict[int, Path] = {}
_folders_of_class: dict[str, set[Path]] = {}


def load_job(path: str | os.PathLike[str], *overrides: str) -> Job:
    """Load a job file and apply overrides, from left to right.

    Relative paths in the file are relative to the file's folder; those in overrides are relative to the working
    directory.

    Args:
      path: the job file, in YAML.
      *overrides: changes of the form `key=value`, such as `"optimizer.lr=8e-5"`.

    Returns:
      The checked job. Jobs are immutable.

    Raises:
      UserError: The file cannot be read, or has mistakes. The error names each of them with its line.
    """
    return open_job(path, overrides).job


def open_job(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoadedJob:
    """Load a job with the origin of each value, and make the classes next to its file importable."""
    from forerun.config.load import load

    loaded = load(Path(path), overrides)
    find_classes(loaded)
    return loaded


def open_stages(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> tuple[Stage, ...]:
    """Return the stages of a job file, or nothing if it has none. Classes next to the file become importable."""
    from forerun.config.stages import stages_of

    stages = stages_of(Path(path), overrides)
    for stage in stages:
        find_classes(stage.loaded)
    return stages


def find_classes(loaded: LoadedJob) -> None:
    """Make the classes next to the file of a job importable."""
    from forerun.models.plugin import use_job_folder
    from forerun.run_folder.model_code import class_names

    folder = loaded.path.parent.resolve()
    if names := class_names(loaded.job).values():
        _folder_of_job[id(loaded.job)] = folder
        weakref.finalize(loaded.job, _folder_of_job.pop, id(loaded.job), None)
        for name in names:
            _folders_of_class.setdefault(name, set()).add(folder)
    use_job_folder(folder)


def prepared(job: Job | str | os.PathLike[str]) -> Job:
    """Return the job that a function of the API works with.

    A path is loaded. A job that was created in Python may have relative paths: they become absolute, because a run
    stores its job in another folder.
    """
    from forerun.config.merge import with_absolute_paths
    from forerun.config.schema import Job
    from forerun.models.plugin import use_job_folder

    if not isinstance(job, Job):
        return load_job(job)
    use_job_folder(_folder_of_job[id(job)] if id(job) in _folder_of_job else _only_folder(job))
    return with_absolute_paths(job)


def _only_folder(job: Job) -> Path | None:
    """Return the folder of the classes of a job that was created in Python, or None if no job file names them.

    Raises:
      UserError: Job files of different folders name the class, so that the wrong one could be trained.
    """
    from forerun.run_folder.model_code import class_names

    named = {name: _folders_of_class.get(name, set()) for name in class_names(job).values()}
    folders = sorted(set().union(*named.values()))
    if len(folders) > 1:
        raise UserError(
            "E-MODEL-051",
            f"{', '.join(name for name, places in named.items() if places)}: classes of several folders are possible",
            why=f"this process loaded job files that name them in {' and '.join(map(str, folders))}",
            fix="use the job that load_job returned, with overrides in load_job instead of a copy; or rename the class",
        )
    return folders[0] if folders else None


def create_job(
    path: str | os.PathLike[str],
    recipe: str,
    *,
    model: str | None = None,
    data: Annotated[str, Value("PATH")] | None = None,
) -> list[Path]:
    """Write a job file from a recipe, with comments that explain its keys.

    Args:
      path: the file to write; it must not exist
      recipe: pretrain, sft, lora, qlora, distil, qat, dpo or custom
      model: name on the hub (owner/name), folder, or named size with random weights (default: that of the recipe)
      data: file or folder with the data (default: that of the recipe)

    Returns:
      The files that were written: the job, and for some recipes a Python module.

    Raises:
      UserError: The recipe does not exist, or a file exists already.
    """
    from forerun.config.recipes import recipe_named, written

    return written(recipe_named(recipe), Path(path), model, data)


def convert(
    path: str | os.PathLike[str],
    *,
    devices: Annotated[int, Value("N")] | None = None,
    model: str | None = None,
    data: Annotated[str, Value("PATH")] | None = None,
) -> ConvertedJob:
    """Convert a configuration of axolotl, TRL or the transformers Trainer to a job.

    Args:
      path: a YAML file of axolotl or TRL, or `TrainingArguments.to_json_string()` in a JSON file
      devices: number of devices, because other trainers count the batch per device (default: that of the file, else 1)
      model: model, if the file does not name it
      data: data, if the file does not name it

    Returns:
      The job, its text with comments, and every key that was not converted, with the reason.

    Raises:
      UserError: The file cannot be read, is not such a configuration, or trains in a way that forerun does not have.
    """
    from forerun.config.migration.foreign_file import convert_file

    if devices is not None and devices < 1:
        raise UserError(
            "E-COMMAND-084",
            f"{devices} is not a number of devices",
            why="the batch is computed for 1 or more devices",
            fix="write for example --devices 8",
        )
    return convert_file(Path(path), devices=devices, model=model, data=data)


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of job files, which editors use for completion and checks."""
    from forerun.config.load import json_schema

    return json_schema()
