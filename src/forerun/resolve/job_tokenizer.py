"""The tokenizer of a job with the tokens that `model.new_tokens` adds, and the vocabulary that follows from it."""

from __future__ import annotations

from forerun.data.new_tokens import extended_tokenizer
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer, load_tokenizer
from forerun.errors import UserError
from forerun.resolve.resolved_job import ResolvedJob


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
