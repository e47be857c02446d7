"""A job becomes concrete: what depends on the data (vocabulary, steps) is filled in.

`plan` and `train` build their Program from the same concrete job. The data is read only if something
is missing, so a job for a named model with `steps` can be planned without its data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forerun.config.schema import Job
from forerun.data.corpus import open_text
from forerun.data.packing import Rows
from forerun.data.permutation import ORDER
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer, load_tokenizer
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.models.pretrained import config_of, is_checkpoint, pretrained
from forerun.models.sizes import Gpt2Config, is_plugin
from forerun.program.derive import derive


@dataclass(frozen=True)
class Corpus:
    tokenizer: Tokenizer
    rows: Rows

    @cached_property
    def digest(self) -> str:
        """Of the tokens, and of the order in which they come."""
        return f"{self.rows.stream.digest()} {ORDER}"


def tokenizer_of(job: Job) -> Tokenizer:
    """The job's, or the checkpoint's own, or plain bytes."""
    if job.data.tokenizer is None and is_checkpoint(job.model):
        return checkpoint_tokenizer(pretrained(job.model).snapshot)
    return load_tokenizer(job.data.tokenizer or "bytes")


def open_corpus(job: Job, cache: Path | None = None) -> Corpus:
    tokenizer = tokenizer_of(job)
    return Corpus(tokenizer, open_text(job.data, sequence=job.sequence, tokenizer=tokenizer, cache=cache))


def concrete(job: Job, corpus: Corpus | None = None) -> Job:
    """The job with its vocabulary and steps known. Opens the corpus if it must."""
    if is_checkpoint(job.model) and job.model.revision is None:
        commit = pretrained(job.model).snapshot.revision  # a branch may move while the run is away
        job = job.model_copy(update={"model": job.model.model_copy(update={"revision": commit})})
    _require_positions(job)
    if corpus is None and job.steps is None:
        corpus = open_corpus(job)
    if job.model.vocab is None and (job.model.name is None or is_plugin(job.model)):
        tokenizer = corpus.tokenizer if corpus else tokenizer_of(job)
        job = _with_vocab(job, tokenizer.vocab)
    elif corpus is not None:
        _require_vocab(job, corpus.tokenizer)
    if job.steps is None:
        assert corpus is not None
        steps = derive(job, MeshShape(1, 1, 1), len(corpus.rows)).steps
        job = job.model_copy(update={"steps": steps, "epochs": None})
    return job


def _with_vocab(job: Job, tokenizer_vocab: int) -> Job:
    vocab = tokenizer_vocab if is_plugin(job.model) else config_of(job.model, tokenizer_vocab).vocab
    return job.model_copy(update={"model": job.model.model_copy(update={"vocab": vocab})})


def _require_positions(job: Job) -> None:
    """A table of positions ends somewhere, and a look-up beyond it would be clamped silently on the device."""
    config = None if is_plugin(job.model) else config_of(job.model, tokenizer_vocab=1)
    if isinstance(config, Gpt2Config) and job.sequence > config.positions:
        raise UserError(
            f"{job.model.name} knows {config.positions} positions, the job's sequence has {job.sequence}",
            why="GPT-2 looks positions up in a table of that length",
            fix=f"set sequence={config.positions} or less",
        )


def _require_vocab(job: Job, tokenizer: Tokenizer) -> None:
    """Token ids beyond the embedding would be clamped silently on the device."""
    vocab = job.model.vocab or config_of(job.model).vocab
    if tokenizer.vocab > vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab} ids, the model's vocabulary only {vocab}",
            why="ids beyond the embedding table would be clamped without a word on the device",
            fix=f"use the model's own tokenizer, or set model.vocab={tokenizer.vocab}",
        )
