"""`resolve_model`: the first line of every command that reads a job. It reads no data.

It fills in the commits of the model, the teacher and the tokenizer, the vocabulary, and the dtype of frozen weights. It
may read config.json and the tokenizer files of checkpoints, and downloads them if necessary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from forerun.config.schema import Job
from forerun.config.training_method import Lora
from forerun.data.new_tokens import extended_tokenizer
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer, hub_name, load_tokenizer, tokenizer_files
from forerun.errors import UserError
from forerun.models.decoder_config import Gpt2Config
from forerun.models.model_facts import ModelFacts, ModelOutline, Pretrained
from forerun.resolve.resolved_job import ResolvedJob
from forerun.resolve.tokenizer_checks import compares_without_data, require_same_tokenizer


def resolve_model(job: Job, base: ModelOutline | None = None) -> ResolvedJob:
    """Return the job with its revisions and its vocabulary filled in. Steps that follow from epochs stay open.

    Args:
      job: the job as the user wrote it.
      base: the outline of its model, if a stage before has not written it yet.

    Raises:
      UserError: a checkpoint cannot be used, or values contradict each other.
    """
    resolved = _with_teacher_revision(_with_tokenizer_revision(_with_revision(ResolvedJob(job, base, written=job))))
    if (frozen := derived_base(resolved.job.method.adapter, resolved.model_facts)) is not None:
        resolved = replace(resolved, job=resolved.job.with_lora_base(frozen.dtype))
    require_positions(resolved.job.sequence, resolved.model_facts)
    return with_vocabulary(resolved)


def require_positions(sequence: int, facts: ModelFacts) -> None:
    """Raise if the sequence is longer than a model's table of positions.

    The device would clamp a position beyond the table silently.
    """
    config = facts.dimensions
    if isinstance(config, Gpt2Config) and sequence > config.positions:
        raise UserError(
            "E-RUN-014",
            f"{facts.section.name} has {config.positions} positions, the job's sequence has {sequence}",
            why="GPT-2 looks positions up in a table of that length",
            fix=f"set sequence={config.positions} or less",
        )


def _with_revision(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with the commit of its checkpoint. A branch could change before the run resumes."""
    snapshot, section = resolved.model_facts.snapshot, resolved.job.model
    if snapshot is None or section.revision is not None:
        return resolved
    return resolved.with_values(model=section.model_copy(update={"revision": snapshot.revision}))


def _with_tokenizer_revision(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with the commit of a tokenizer on the hub: `owner/name@commit`."""
    data = resolved.job.data
    repository = hub_name(data.tokenizer or "bytes")
    if repository is None:
        return resolved
    files = tokenizer_files(data.tokenizer or "bytes")
    assert files is not None
    return resolved.with_values(data=data.model_copy(update={"tokenizer": f"{repository[0]}@{files.revision}"}))


def _with_teacher_revision(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with the commit of its teacher. Raise if the teacher uses other tokens than the student.

    A teacher whose logits are cached is not needed, so it is not checked. `with_data` compares tokenizers that are not
    known yet.
    """
    teacher = resolved.step_teacher
    if teacher is None:
        return resolved
    require_positions(resolved.job.sequence, teacher)
    if compares_without_data(resolved.job, resolved.model_facts, teacher):
        require_same_tokenizer(teacher, tokenizer_of(resolved))
    if teacher.snapshot is None or teacher.section.revision is not None:
        return resolved
    return replace(resolved, job=resolved.job.with_teacher_revision(teacher.snapshot.revision))


# ---- The dtype of the frozen weights under adapters (`lora.base`) ----
#
# The weights of a run with adapters end up in an export, or PEFT adds the adapters to the original files. So the frozen
# weights are rounded only if the job asks for it.


class AdapterBase(NamedTuple):
    """A dtype for `lora.base`, and where it comes from."""

    dtype: Literal["float32", "bfloat16"]
    reason: str


def default_base(facts: ModelFacts) -> AdapterBase:
    """Return the dtype of the frozen weights of a job that leaves `lora.base` open."""
    checkpoint, name = facts.checkpoint, facts.section.name
    if checkpoint is None:
        return AdapterBase("bfloat16", "the weights are random: half the memory of float32")
    if form := dequantized_form(checkpoint):
        return AdapterBase("bfloat16", f"{name} has {form}, which are read as bfloat16")
    file = "weight files" if (dtype := checkpoint.dtype_of(files=True)) else "config.json"
    dtype = dtype or checkpoint.dtype_of(files=False)
    if dtype == "float32":
        return AdapterBase("float32", f"as in the {file} of {name}")
    if dtype == "bfloat16":
        return AdapterBase("bfloat16", f"as in the {file} of {name}")
    return AdapterBase("bfloat16", f"{name} has {dtype or 'no dtype'} in its {file}")


def derived_base(adapter: Lora | None, facts: ModelFacts) -> AdapterBase | None:
    """Return the dtype of the frozen weights, or None if the job sets it or has no adapters."""
    return default_base(facts) if adapter is not None and adapter.base is None else None


def dequantized_form(checkpoint: Pretrained) -> str | None:
    """Return the form of weights that are not stored as plain floats, or None."""
    if checkpoint.mxfp4:
        return "experts in MXFP4"
    if checkpoint.float8 is not None:
        return "FP8 weights"
    return "integers" if checkpoint.packed is not None else None


# ---- The tokenizer with the tokens that `model.new_tokens` adds, and the vocabulary that follows from it ----


def tokenizer_of(resolved: ResolvedJob) -> Tokenizer:
    """Return the tokenizer that the job names, else the checkpoint's own, else the byte tokenizer.

    New tokens of the job are added to it.
    """
    require_new_tokens(resolved)
    section, snapshot = resolved.job.model, resolved.model_facts.snapshot
    if resolved.job.data.tokenizer is None and snapshot is not None:
        tokenizer = checkpoint_tokenizer(snapshot)
    else:
        tokenizer = load_tokenizer(resolved.job.data.tokenizer or "bytes")
    if not section.added_tokens:
        return tokenizer
    return extended_tokenizer(tokenizer, section.new_tokens or (), section.new_special_tokens or ())


def require_new_tokens(resolved: ResolvedJob) -> None:
    """Raise if the job adds tokens to a model that is not a checkpoint."""
    model = resolved.job.model
    if model.added_tokens and not resolved.model_facts.is_checkpoint:
        raise UserError(
            "E-METHOD-020",
            "model.new_tokens is for a pretrained model",
            why=f"{model.name or 'this model'} starts with random weights, and so do all rows of its embedding",
            fix="add the tokens to the tokenizer itself: forerun tokenizer train --special TEXT",
        )


def with_vocabulary(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with the size of its vocabulary, and with the id of its first new token.

    A checkpoint and a named size have a published vocabulary. That of a named size is replaced if the job names a
    tokenizer with another number of ids. Without one, the tokens are bytes.

    Raises:
      UserError: the job adds tokens, and its tokenizer has more old ids than the checkpoint has rows.
    """
    require_new_tokens(resolved)
    facts, section = resolved.model_facts, resolved.job.model
    if section.added_tokens:
        return _with_new_tokens(resolved)
    names_tokenizer = resolved.job.data.tokenizer not in (None, "bytes")
    is_published = facts.is_checkpoint or (section.name is not None and not facts.is_plugin and not names_tokenizer)
    if section.vocab is not None or is_published:
        return resolved
    ids = tokenizer_of(resolved).vocab
    dimensions = facts.config_for(ids)
    vocab = ids if dimensions is None else dimensions.vocab
    return resolved.with_values(model=section.model_copy(update={"vocab": vocab}))


def _with_new_tokens(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with the vocabulary of its files, or a larger one if these have no spare rows."""
    section, checkpoint = resolved.job.model, resolved.model_facts.checkpoint
    assert checkpoint is not None, "`require_new_tokens` rejects other models"
    ids, rows = tokenizer_of(resolved).vocab, checkpoint.config.vocab
    first = ids - len(section.added_tokens)
    if first > rows:
        raise UserError(
            "E-METHOD-021",
            f"the tokenizer has {first} ids without the new tokens, the checkpoint only {rows} rows",
            why="ids between them would have no embedding",
            fix="use the tokenizer of the checkpoint: remove data.tokenizer",
        )
    values = {"vocab": max(rows, ids), "first_new_token": first}
    return resolved.with_values(model=section.model_copy(update=values))
