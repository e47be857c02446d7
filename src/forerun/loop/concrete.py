"""A job becomes concrete: what depends on the data (vocabulary, steps) is filled in.

`plan` and `train` build their Program from the same concrete job. The data is read only if something
is missing, so a job for a named model with `steps` can be planned without its data.
"""

from __future__ import annotations

from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.loop.corpus import open_corpus, require_vocab, tokenizer_of
from forerun.models.pretrained import config_of, is_checkpoint, pretrained
from forerun.models.sizes import Gpt2Config, is_plugin
from forerun.program.derive import derive


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
        require_vocab(corpus.tokenizer, job.model.vocab or config_of(job.model).vocab)
    if job.steps is None:
        assert corpus is not None
        steps = derive(job, MeshShape(1, 1, 1), corpus.rows.epoch).steps
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
