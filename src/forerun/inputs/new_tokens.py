"""New tokens of a job: the checks of `model.new_tokens`, and the ids and the vocabulary that a run records."""

from __future__ import annotations

from forerun.config.schema import Job
from forerun.data.tokenizer import Tokenizer
from forerun.errors import UserError
from forerun.models.pretrained import is_checkpoint, pretrained


def require_checkpoint(job: Job) -> None:
    """Raise if the job adds tokens to a model that is not a checkpoint."""
    if job.model.added_tokens and not is_checkpoint(job.model):
        raise UserError(
            "E-METHOD-020",
            "model.new_tokens is for a pretrained model",
            why=f"{job.model.name or 'this model'} starts with random weights, and so do all rows of its embedding",
            fix="add the tokens to the tokenizer itself: forerun tokenizer train --special TEXT",
        )


def vocab_with_new_tokens(job: Job, tokenizer: Tokenizer) -> int:
    """Return the vocabulary of a checkpoint with new tokens: that of its files, or more if these have no spare rows.

    Raises:
      UserError: the tokenizer has more old ids than the checkpoint has rows.
    """
    rows = pretrained(job.model).config.vocab
    first = tokenizer.vocab - len(job.model.added_tokens)
    if first > rows:
        raise UserError(
            "E-METHOD-021",
            f"the tokenizer has {first} ids without the new tokens, the checkpoint only {rows} rows",
            why="ids between them would have no embedding",
            fix="use the tokenizer of the checkpoint: remove data.tokenizer",
        )
    return max(rows, tokenizer.vocab)


def with_new_tokens(job: Job, tokenizer: Tokenizer) -> Job:
    """Return the job with the id of its first new token and the new size of the vocabulary."""
    first = tokenizer.vocab - len(job.model.added_tokens)
    values = {"vocab": vocab_with_new_tokens(job, tokenizer), "first_new_token": first}
    return job.model_copy(update={"model": job.model.model_copy(update=values)})
