"""What one stage writes and the next one starts with: an outline to plan with, then the trained result."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from forerun.checkpoint.reader import chosen_step
from forerun.config.schema import Job
from forerun.config.stages import Stage, run_path
from forerun.data.source.identity import cache_folder
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.methods.method import run_specs
from forerun.models.model_facts import ModelOutline
from forerun.models.quantization_config import QUANTIZATION, RECORD
from forerun.reporter import SILENT, Reporter
from forerun.resolve.resolve_model import resolve_model, tokenizer_of
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.summary import finished_summary
from forerun.run_folder.run_folder import RunFolder, folder_of, job_of_run, newest_record
from forerun.trained_model.chat_form import own_chat_form
from forerun.verbs.export.result import ExportForm
from forerun.verbs.export.write_model import config_without, integer_section, write_export, write_words
from forerun.weights_io import documents
from forerun.weights_io.packed import section_of

FOLDER = "stages"  # in the cache folder of forerun


def resolve_stage(stage: Stage) -> ResolvedJob:
    """Return the resolved job of a stage. It has an outline of its model if that is not written yet."""
    return resolve_model(stage.job, outline_of(stage))


def planning_job(stage: Stage) -> Job:
    """Return the job of a stage for functions that take a job and read no weights.

    If the model of the stage is not written yet, the job names the folder of its outline.
    """
    job, outline = stage.job, outline_of(stage)
    if outline is None:
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"name": str(outline.folder)})})


def outline_of(stage: Stage) -> ModelOutline | None:
    """Return the outline of the model that a stage starts with, or None if that model exists."""
    writer = stage.model_writer
    if writer is None or (Path(str(stage.job.model.name)) / "config.json").is_file():
        return None
    return ModelOutline(_outline(writer), f"result of stage {writer.name}")


def _outline(stage: Stage) -> Path:
    """Write the outline of the model that a stage results in to the cache, and return its folder.

    The name of the folder has a digest of its files, so that a changed stage gets another folder.
    """
    parent = cache_folder() / FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        part = Path(folder)
        _write_outline(stage, part)
        target = parent / f"{stage.job.name}-{_digest(part)}"
        if not target.exists():
            part.rename(target)
            part.mkdir()  # for the removal at the end of the block
    return target


def _write_outline(stage: Stage, folder: Path) -> None:
    resolved = resolve_stage(stage)
    job, facts, base = resolved.job, resolved.model_facts, resolved.model_facts.snapshot
    tokenizer = tokenizer_of(resolved)
    assert facts.family is not None, "a custom class cannot have stages"
    assert facts.config is not None
    content = documents.config_json(
        facts.family, facts.config, config_without(base) if base else None, "F32", int(tokenizer.eos)
    )
    chat = own_chat_form(RunFolder(run_path(job)), job, base, tokenizer)
    if chat is not None and chat.end.token is not None:
        documents.set_text_value(content, "eos_token_id", chat.end.token)
    documents.write_json(folder / "config.json", content | _rounding(resolved, folder))
    write_words(job, base, tokenizer, chat, folder)


def _rounding(resolved: ResolvedJob, folder: Path) -> dict[str, Any]:
    """Return the section on integers for config.json. If there is no integer form, write it to the folder `qat`."""
    if not resolved.job.method.trains_rounded_weights:
        return {}
    if (section := integer_section(resolved)) is not None:
        return {QUANTIZATION: section}
    family, model = resolved.model_facts.family, resolved.model
    assert family is not None
    (folder / RECORD).mkdir()
    recorded = section_of(run_specs(resolved), family, model, as_integers=False)  # type: ignore[arg-type]
    documents.write_json(folder / RECORD / "config.json", {QUANTIZATION: recorded})
    return {}


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(os.fsencode(path.relative_to(folder)) + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


# ---- Results ----


RESULT_RECORD = "result.json"  # beside the result: the step that it was written from


def ready_job(stage: Stage, reporter: Reporter) -> Job:
    """Return the job of a stage, after its start was written. The first stage starts with the model of the file.

    Raises:
      UserError: the stage before is not finished, or it was trained further after this stage had started.
    """
    before, folder = stage.before, stage.start_folder
    if before is None or folder is None:
        return stage.job
    run = RunFolder(run_path(before.job))
    earlier = job_of_run(run)
    record, newest = _record(folder), None if earlier is None else _newest_step(run, earlier)
    if record is None or not folder.is_dir() or newest not in (None, record["newest"]):
        if record is not None and newest not in (None, record["newest"]) and has_begun(stage.job):
            raise _trained_further(before, stage, record["newest"], newest)
        _write_result(before, stage, folder, earlier, reporter)
    if stage.start == "adapter" and earlier is not None and stage.job.model.name == earlier.model.name:
        # The branch of a hub name could have moved since the adapters were trained.
        return stage.job.model_copy(update={"model": earlier.model})
    return stage.job


def require_unused(stage: Stage, after: Stage | None) -> None:
    """Raise if a finished stage has another number of steps now, and the next stage has already started from it."""
    earlier = job_of_run(RunFolder(run_path(stage.job)))
    if after is None or earlier is None or stage.job.steps in (None, earlier.steps) or not has_begun(after.job):
        return
    raise _trained_further(stage, after, earlier.steps, stage.job.steps)


def has_begun(job: Job) -> bool:
    """Return whether the run of a job has a checkpoint."""
    return newest_record(folder_of(job).checkpoints(job)) is not None


def _write_result(before: Stage, stage: Stage, folder: Path, earlier: Job | None, reporter: Reporter) -> None:
    """Write the result of a finished stage, and replace an older one."""
    if earlier is None or finished_summary(_with_steps(resolve_stage(before), earlier), SILENT) is None:
        raise UserError(
            "E-RUN-061",
            f"stage {stage.name} starts with the result of stage {before.name}, which is not finished",
            why=f"{run_path(before.job)} has no final checkpoint",
            fix="run `forerun train` without --stage: it runs all stages in their order",
        )
    run = RunFolder(run_path(before.job))
    where = run.checkpoints(earlier)
    newest, step = chosen_step(where, "newest"), chosen_step(where, before.result)
    reporter.info(f"stage {stage.name} {stage.start_text}, step {step}")
    shutil.rmtree(folder, ignore_errors=True)
    _record_file(folder).unlink(missing_ok=True)
    if stage.start == "adapter":
        form = ExportForm(only_adapters=True, step=step)
    else:
        form = ExportForm(
            dtype=earlier.precision.params,
            merge=earlier.method.trains_adapters,
            dense=earlier.method.trains_rounded_weights and integer_section(ResolvedJob(earlier)) is None,
            step=step,
        )
    proof = write_export(run, folder, form).proof
    reporter.info(proof)
    # A result without its record was interrupted, and is written again.
    atomic_write(_record_file(folder), json.dumps({"newest": newest, "step": step, "proof": proof}))


def _with_steps(resolved: ResolvedJob, earlier: Job) -> ResolvedJob:
    """Return the job with the number of steps that the run derived from its data, if the job does not set it."""
    return resolved if resolved.job.steps is not None else resolved.with_values(steps=earlier.steps, epochs=None)


def _newest_step(run: RunFolder, job: Job) -> int | None:
    from forerun.checkpoint.reader import Reader

    steps = Reader(run.checkpoints(job)).steps()
    return max(steps) if steps else None


def _record_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-{RESULT_RECORD}")


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(_record_file(folder).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and "newest" in found else None


def _trained_further(stage: Stage, after: Stage, then: int | None, now: int | None) -> UserError:
    return UserError(
        "E-RUN-060",
        f"stage {after.name} has started from step {then} of stage {stage.name}, which has {now} steps now",
        why=f"the checkpoints of {run_path(after.job)} continue the weights of that step",
        fix=f"set stages.{stage.name}.steps={then}, or start over from there: "
        f"forerun train --stage {stage.name} --fresh, then the same command without --stage",
    )
