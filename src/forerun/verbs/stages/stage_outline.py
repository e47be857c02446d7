"""Outlines of the models that stages result in: config.json and the tokenizer, but no weights.

`check`, `plan`, `data` and `cache` need the dimensions, the rounding and the tokenizer of a stage's model, but not its
weights. With the outline they work before the first stage was trained, also on a machine that will not train it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from forerun.config.schema import Job
from forerun.config.stages import Stage, run_path
from forerun.data.source.identity import cache_folder
from forerun.methods.method import run_specs
from forerun.models.model_facts import ModelOutline
from forerun.models.quantization_config import QUANTIZATION, RECORD
from forerun.resolve.job_tokenizer import tokenizer_of
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.run_folder import RunFolder
from forerun.trained_model.chat_form import own_chat_form
from forerun.verbs.export.write_model import config_without, integer_section, write_words
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
        _write(stage, part)
        target = parent / f"{stage.job.name}-{_digest(part)}"
        if not target.exists():
            part.rename(target)
            part.mkdir()  # for the removal at the end of the block
    return target


def _write(stage: Stage, folder: Path) -> None:
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
