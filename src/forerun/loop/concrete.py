"""A job becomes concrete: what depends on the data (vocabulary, steps) is filled in.

`plan` and `train` build their Program from the same concrete job. The data is read only if something
is missing, so a job for a named model with `steps` can be planned without its data.
"""

from __future__ import annotations

from forerun.config.schema import Job, Model
from forerun.data.corpus import Corpus
from forerun.data.order.enough import require_one_batch
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.loop.corpus import open_corpus, require_vocab, tokenizer_of
from forerun.loop.vocabulary import require_same_tokenizer
from forerun.models.pretrained import config_of, is_checkpoint, pretrained
from forerun.models.sizes import Gpt2Config, is_plugin
from forerun.models.teacher import teacher_section
from forerun.program.derive import derive


def concrete(job: Job, corpus: Corpus | None = None) -> Job:
    """The job with its vocabulary and steps known. Opens the corpus if it must."""
    if is_checkpoint(job.model) and job.model.revision is None:
        commit = pretrained(job.model).snapshot.revision  # a branch may move while the run is away
        job = job.model_copy(update={"model": job.model.model_copy(update={"revision": commit})})
    job = _with_teacher(job, corpus)
    require_positions(job, job.model)
    if corpus is None and job.steps is None:
        corpus = open_corpus(job)
    if job.model.vocab is None and (job.model.name is None or is_plugin(job.model)):
        tokenizer = corpus.tokenizer if corpus else tokenizer_of(job)
        job = _with_vocab(job, tokenizer.vocab)
    elif corpus is not None:
        require_vocab(corpus.tokenizer, job.model.vocab or config_of(job.model).vocab)
    if corpus is not None:
        require_one_batch(corpus.rows, job.batch)
    if job.steps is None:
        assert corpus is not None
        steps = derive(job, MeshShape(1, 1, 1), corpus.rows.epoch).steps
        job = job.model_copy(update={"steps": steps, "epochs": None})
    return job


def _with_vocab(job: Job, tokenizer_vocab: int) -> Job:
    vocab = tokenizer_vocab if is_plugin(job.model) else config_of(job.model, tokenizer_vocab).vocab
    return job.model_copy(update={"model": job.model.model_copy(update={"vocab": vocab})})


def _with_teacher(job: Job, corpus: Corpus | None) -> Job:
    """Its commit known and its tokenizer compared; one that was written down need not be here any more."""
    if job.distil is None or job.distil.cache is not None:
        return job
    teacher = teacher_section(job)
    if is_checkpoint(teacher) and teacher.revision is None:
        commit = pretrained(teacher).snapshot.revision
        job = job.model_copy(update={"distil": job.distil.model_copy(update={"revision": commit})})
    require_positions(job, teacher)
    if corpus is not None:
        require_same_tokenizer(job, corpus.tokenizer)
    elif (job.data.tokenizer or _has_tokenizer(job.model)) and _has_tokenizer(teacher):  # a plan needs none
        require_same_tokenizer(job, tokenizer_of(job))
    return job


def _has_tokenizer(model: Model) -> bool:
    return is_checkpoint(model) and pretrained(model).snapshot.file("tokenizer.json") is not None


def require_positions(job: Job, model: Model) -> None:
    """A table of positions ends somewhere, and a look-up beyond it would be clamped silently on the device."""
    config = None if is_plugin(model) else config_of(model, tokenizer_vocab=1)
    if isinstance(config, Gpt2Config) and job.sequence > config.positions:
        raise UserError(
            f"{model.name} knows {config.positions} positions, the job's sequence has {job.sequence}",
            why="GPT-2 looks positions up in a table of that length",
            fix=f"set sequence={config.positions} or less",
        )
