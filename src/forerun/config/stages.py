"""Job files with stages: a list of ordinary jobs, each of which starts with the result of the one before.

`stages` maps names to keys that replace the other keys of the file in that stage. The functions here are pure: they
read the file, and neither runs nor models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forerun.config import merge
from forerun.config.load import FILE_KEYS, STAGE_KEYS, STAGES, LoadedJob, Origin, default_name, loaded_job
from forerun.config.schema import FOLDER_NAME, Job
from forerun.config.training_method import Lora
from forerun.errors import UserError, did_you_mean

ADAPTER_SHAPE = ("rank", "alpha", "targets", "rslora", "dora")

Result = Literal["newest", "best"]


@dataclass(frozen=True)
class Stage:
    """One stage of a file.

    Args:
      name: its name in the file.
      loaded: its job. The job names the folder that the stage before writes, which may not exist yet.
      before: the stage whose result it starts with, or None for the first stage.
      start: that result: a complete model, or adapters for the model of the stage before. None for the first stage.
      result: the checkpoint that the next stage starts with.
      merges: whether its adapters are merged for the next stage. None: if the next stage cannot continue them.
    """

    name: str
    loaded: LoadedJob
    before: Stage | None
    start: Literal["model", "adapter"] | None
    result: Result
    merges: bool | None

    @property
    def job(self) -> Job:
        return self.loaded.job

    @property
    def start_folder(self) -> Path | None:
        """The folder of the result that this stage starts with, or None for the first stage."""
        return None if self.before is None or self.start is None else run_path(self.before.job) / self.start

    @property
    def model_writer(self) -> Stage | None:
        """The stage that writes the model of this stage, or None if it is the model of the file."""
        stage = self
        while stage.start == "adapter" and stage.before is not None:
            stage = stage.before
        return stage.before

    @property
    def start_text(self) -> str:
        """What this stage starts with, for the user."""
        before = self.before
        if before is None:
            return "starts with the model of the file"
        integers = before.job.method.integer_weights
        if self.start == "adapter":
            base = f"its {integers} codes and scales" if integers else "its base"
            return f"continues the adapters of stage {before.name} on {base}"
        if before.job.method.trains_adapters:
            return f"starts with the weights of stage {before.name}, adapters merged"
        form = f"{integers} codes and scales" if integers else "weights"
        return f"starts with the {form} of stage {before.name}"


def stages_of(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Stage, ...]:
    """Return the stages of a job file in their order, or nothing if the file has none.

    An override such as `optimizer.lr=1e-5` applies to all stages, and `stages.qat.optimizer.lr=1e-5` to one of them.

    Raises:
      UserError: the file cannot be read, or a job is invalid.
    """
    given = merge.read_unmerged(Path(path))
    if STAGES not in given.tree:
        return ()
    names = _names(given)
    targets = [(override, _targets(override, names)) for override in overrides]
    found: list[Stage] = []
    for name in names:
        own = [override for override, stages in targets if name in stages]
        found.append(_stage(given, name, own, found[-1] if found else None))
    return tuple(found)


def stage_named(stages: Sequence[Stage], name: str) -> Stage:
    """Return the stage of this name. Raise UserError if there is none."""
    found = next((stage for stage in stages if stage.name == name), None)
    if found is None:
        raise _unknown(name, [stage.name for stage in stages])
    return found


def run_path(job: Job) -> Path:
    """Return the absolute path of a job's run folder. The model of a later stage is below it."""
    return Path(os.path.abspath(Path(job.runs) / job.name))


def _names(given: merge.Given) -> list[str]:
    """Return the names of the stages. Raise UserError if the section is not a table of sections."""
    section = given.tree[STAGES]
    wrong = None
    if not isinstance(section, dict) or not section:
        wrong = "it is not a section of stages"
    else:
        for name, keys in section.items():
            if not re.fullmatch(FOLDER_NAME, name):
                wrong = f"{name!r} is not a safe folder name: use letters, digits, '.', '_' and '-'"
            elif keys is None:
                wrong = f"{name} has no keys; adapters are merged without a separate stage"
            elif not isinstance(keys, dict):
                wrong = f"{name} is a value, not a section of keys"
    if wrong:
        raise UserError(
            "E-JOB-111",
            "'stages' is not a list of stages",
            why=f"{given.place((STAGES,))}: {wrong}",
            fix="write a name and the keys of each stage: stages: {sft: {steps: 500}, dpo: {preferences: dpo}}",
        )
    return list(section)


def _targets(override: str, names: Sequence[str]) -> Sequence[str]:
    """Return the stages that an override changes."""
    first, _, rest = override.partition(".")
    if first != STAGES:
        return names
    name = re.split("[.=]", rest)[0]
    if name not in names:
        raise _unknown(name, names)
    return [name]


def _unknown(name: str, names: Sequence[str]) -> UserError:
    near = did_you_mean(name, names)
    return UserError(
        "E-JOB-112",
        f"there is no stage {name!r}",
        why=f"stages: {', '.join(names)}" if names else "the file has no stages",
        fix=f"did you mean '{near}'?" if near else "name one of the stages of the file" if names else "remove --stage",
    )


def _stage(file: merge.Given, name: str, overrides: Sequence[str], before: Stage | None) -> Stage:
    own = [key for override in overrides if (key := _stage_override(override, name)) is not None]
    given = merge.with_section(file, (STAGES, name), [override.removeprefix(_prefix(name)) for override in overrides])
    _require_stage_keys(file, name, own, before)
    result: Result = _stage_key(given, "result", ("newest", "best")) or "newest"
    merges: bool | None = _stage_key(given, "merge", (True, False))
    given.tree["name"] = f"{given.tree.get('name', default_name(given.file))}-{name}"
    if before is not None:
        _require_folder_form(before)
        given.tree["model"] = before.job.model.model_dump(exclude_defaults=True)
    loaded = loaded_job(given)
    if merges is not None and not loaded.job.method.trains_adapters:
        raise UserError(
            "E-JOB-115",
            f"stage {name} has no adapters to merge",
            why=f"{given.place(('merge',))} sets merge, and the stage has no lora section",
            fix="remove merge, or add the lora section",
        )
    if before is None:
        return Stage(name, loaded, None, None, result, merges)
    kind = _start(before, loaded.job, given)
    return _started(Stage(name, loaded, before, kind, result, merges), given)


def _require_folder_form(stage: Stage) -> None:
    """Raise if the model is a custom class: its result could not be written for the next stage."""
    if ":" in (stage.job.model.name or ""):
        raise UserError(
            "E-JOB-117",
            f"the custom model {stage.job.model.name} cannot be trained in several stages",
            why=f"the result of stage {stage.name} would be a Hugging Face folder, which a custom class does not have",
            fix="use one stage, or a model of a known family",
        )


def _prefix(name: str) -> str:
    return f"{STAGES}.{name}."


def _stage_override(override: str, name: str) -> str | None:
    """Return the first key of an override for one stage, or None if the override is for all stages."""
    rest = override.removeprefix(_prefix(name))
    return None if rest == override else re.split("[.=]", rest)[0]


def _require_stage_keys(file: merge.Given, name: str, overrides: Sequence[str], before: Stage | None) -> None:
    """Raise if a stage sets a key that all stages share, or that the stage before determines."""
    fixed = (*FILE_KEYS, STAGES, *(() if before is None else ("model",)))
    for key in (*file.tree[STAGES][name], *overrides):
        if key in fixed:
            result = f"its model is the result of stage {before.name}" if before else ""
            raise UserError(
                "E-JOB-113",
                f"stage {name} cannot set '{key}'",
                why=f"{file.place((STAGES, name, key))}: {result if key == 'model' else 'all stages share this key'}",
                fix="remove it, or write a separate job file for it",
            )


def _stage_key(given: merge.Given, key: str, allowed: Sequence[Any]) -> Any:
    """Remove a key that only stages have, and return its value, or None if it is not set."""
    value = given.tree.pop(key, None)
    if value is not None and (value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool)):
        raise UserError(
            "E-JOB-116",
            f"{key}: {value!r} is not possible",
            why=f"{given.place((key,))} sets {key} ({STAGE_KEYS[key]['description']})",
            fix=f"write {' or '.join(str(one).lower() for one in allowed)}",
        )
    return value


def _start(before: Stage, job: Job, given: merge.Given) -> Literal["model", "adapter"]:
    """Return what a stage starts with: adapters that it continues, or a complete model."""
    old, new = before.job.lora, job.lora
    if old is None:
        return "model"
    different = _differences(before.job, job, old, new, is_rounding_set="qat" in given.tree)
    if before.merges is False and different:
        raise UserError(
            "E-JOB-114",
            f"stage {before.name} has merge: false, but the next stage cannot continue its adapters",
            why=f"the next stage has another {', '.join(different)}",
            fix="make the lora and qat sections of both stages equal, or remove merge: the adapters are then merged",
        )
    return "model" if different or before.merges else "adapter"


def _differences(before: Job, job: Job, old: Lora, new: Lora | None, *, is_rounding_set: bool) -> list[str]:
    """Return the keys that prevent a stage from continuing the adapters of the stage before."""
    if new is None:
        return ["lora"]
    found = [f"lora.{key}" for key in ADAPTER_SHAPE if getattr(old, key) != getattr(new, key)]
    if new.start is not None:
        found.append("lora.start")
    if is_rounding_set and job.qat != before.qat:  # else the rounding is that of the stage before
        found.append("qat")
    is_random = "/" not in (job.model.name or "")  # the frozen weights come from the seed
    return found + (["seed"] if is_random and job.seed != before.seed else [])


def _started(stage: Stage, given: merge.Given) -> Stage:
    """Return the stage with the keys that follow from the result of the stage before."""
    before, folder, job = stage.before, stage.start_folder, stage.job
    assert before is not None
    assert folder is not None
    changed: list[str] = ["model.name"]
    if stage.start == "model":
        given.tree["model"] = {"name": str(folder)}
    else:
        given.tree["lora"] = {**given.tree["lora"], "start": str(folder)}
        changed = ["lora.start"]
        if job.preferences is not None and job.preferences.reference == "auto":
            # The reference is the model that the stage starts with, which includes the adapters.
            given.tree["preferences"] = {**given.tree["preferences"], "reference": "cached"}
            changed.append("preferences.reference")
    rounding = before.job.qat
    if rounding is not None and "qat" not in given.tree and (stage.start == "adapter" or before.job.lora is None):
        scales = "computed" if job.lora is not None else rounding.scales
        given.tree["qat"] = {**rounding.model_dump(), "scales": scales}
        changed += [f"qat.{key}" for key in type(rounding).model_fields]
    loaded = loaded_job(given)
    origin = Origin("file", f"stage {before.name}")
    return replace(stage, loaded=replace(loaded, origins=loaded.origins | dict.fromkeys(changed, origin)))
