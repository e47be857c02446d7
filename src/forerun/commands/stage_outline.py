"""Plans of later stages: a folder with the config.json and the tokenizer that an earlier stage will write, no weights.

`check`, `plan`, `data` and `cache` need the dimensions, the rounding and the tokenizer of a stage's model, but not its
weights. With the outline they work before the first stage was trained, also on a machine that will not train it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from forerun.commands.export import write_words
from forerun.commands.export_rounding import config_without, integer_section
from forerun.config.schema import Job
from forerun.config.stages import Stage, run_path
from forerun.data.source.identity import cache_folder
from forerun.inputs.chat_form import own_chat_form
from forerun.inputs.job_corpus import tokenizer_of
from forerun.inputs.resolve_job import facts_with_vocab
from forerun.inputs.run_folder import RunFolder
from forerun.models.rounding import QUANTIZATION, RECORD
from forerun.resolve.resolved_job import ResolvedJob
from forerun.weights_io import documents
from forerun.weights_io.packed import section_of

FOLDER = "stages"  # in the cache folder of forerun


def planning_job(stage: Stage) -> Job:
    """Return the job of a stage for commands that read no weights.

    If the model of the stage is not written yet, the job names an outline of it in the cache folder.
    """
    job, writer = stage.job, stage.model_writer
    if writer is None or (Path(str(job.model.name)) / "config.json").is_file():
        return job
    outline = str(_outline(writer))
    return job.model_copy(update={"model": job.model.model_copy(update={"name": outline})})


def _outline(stage: Stage) -> Path:
    """Write the outline of the model that a stage results in, and return its folder.

    The name of the folder has a digest of its files, because results of compilations are cached by this name.
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
    job = planning_job(stage)
    facts = facts_with_vocab(job)
    job = job.model_copy(update={"model": facts.section})
    resolved, base = ResolvedJob(job), facts.snapshot
    tokenizer = tokenizer_of(job)
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
    recorded = section_of(resolved.specs, family, model, as_integers=False)  # type: ignore[arg-type]
    documents.write_json(folder / RECORD / "config.json", {QUANTIZATION: recorded})
    return {}


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(os.fsencode(path.relative_to(folder)) + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]
