"""`resolve`: return a ResolvedJob, with the values filled in that depend on the data and on checkpoints.

`check`, `plan`, `train` and `cache` all call it, so they use the same job. It reads the data only if a value is
missing: a job for a named model with `steps` can be planned without its data.
"""

from __future__ import annotations

from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.tokenizer import Tokenizer, hub_name, tokenizer_files
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.inputs.job_corpus import model_vocab, open_corpus, require_vocab, tokenizer_of
from forerun.inputs.new_tokens import with_new_tokens
from forerun.inputs.teacher_tokenizer import require_same_tokenizer
from forerun.methods.adapter_base import derived_base
from forerun.models.decoder_config import Gpt2Config
from forerun.models.pretrained import config_of, teacher_section
from forerun.program.derive import GIVEN, derive
from forerun.resolve.model_facts import ModelFacts
from forerun.resolve.resolved_job import ResolvedJob


def resolve(job: Job, corpus: Corpus | None = None) -> ResolvedJob:
    """Return the job with its revisions, vocabulary and steps filled in.

    Args:
      job: the job as the user wrote it.
      corpus: the job's data if the caller has opened it. Without it, the data is opened if `steps` is missing.

    Raises:
      UserError: the values contradict each other, for example a tokenizer with more ids than the vocabulary.
    """
    job = _with_tokenizer_revision(_with_revision(job))
    job = _with_teacher_revision(job, corpus)
    if (base := derived_base(job)) is not None:
        job = job.with_lora_base(base.dtype)
    require_positions(job, ModelFacts(job.model))
    if corpus is None and job.steps is None:
        corpus = open_corpus(job)
    if job.model.added_tokens:
        job = with_new_tokens(job, corpus.tokenizer if corpus else tokenizer_of(job))
    vocab = model_vocab(job)
    if vocab is None:
        facts = facts_with_vocab(job, corpus.tokenizer if corpus else None)
        job = job.model_copy(update={"model": facts.section})
    elif corpus is not None:
        require_vocab(corpus.tokenizer, vocab)
    if corpus is not None:
        from forerun.data.order.batches import require_one_batch  # imports jax, which a plan of a named model avoids

        require_one_batch(corpus.rows, job.batch)
    reason = GIVEN
    if job.steps is None:
        assert corpus is not None
        derived = derive(job, MeshShape(1, 1, 1), corpus.rows.epoch)  # steps do not depend on the mesh
        job, reason = job.model_copy(update={"steps": derived.steps, "epochs": None}), derived.reasons["steps"]
    return ResolvedJob(job, reason)


def facts_with_vocab(job: Job, tokenizer: Tokenizer | None = None) -> ModelFacts:
    """Return the facts about the job's model, with the vocabulary of the tokenizer if the job names none.

    Without `tokenizer`, the job's tokenizer is opened if it is needed.
    """
    facts = ModelFacts(job.model)
    if model_vocab(job) is not None:
        return facts
    ids = (tokenizer or tokenizer_of(job)).vocab
    vocab = ids if facts.is_plugin else config_of(job.model, ids).vocab
    return ModelFacts(job.model.model_copy(update={"vocab": vocab}))


def require_positions(job: Job, facts: ModelFacts) -> None:
    """Raise if the sequence is longer than a model's table of positions.

    The device would clamp a position beyond the table silently.
    """
    config = None if facts.is_plugin else config_of(facts.section, tokenizer_vocab=1)  # the vocabulary may be unknown
    if isinstance(config, Gpt2Config) and job.sequence > config.positions:
        raise UserError(
            "E-RUN-014",
            f"{facts.section.name} has {config.positions} positions, the job's sequence has {job.sequence}",
            why="GPT-2 looks positions up in a table of that length",
            fix=f"set sequence={config.positions} or less",
        )


def _with_revision(job: Job) -> Job:
    """Return the job with the commit of its checkpoint. A branch could change before the run resumes."""
    snapshot = ModelFacts(job.model).snapshot
    if snapshot is None or job.model.revision is not None:
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"revision": snapshot.revision})})


def _with_tokenizer_revision(job: Job) -> Job:
    """Return the job with the commit of a tokenizer on the hub: `owner/name@commit`."""
    named = hub_name(job.data.tokenizer or "bytes")
    if named is None:
        return job
    files = tokenizer_files(job.data.tokenizer or "bytes")
    assert files is not None
    pinned = f"{named[0]}@{files.revision}"
    return job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": pinned})})


def _with_teacher_revision(job: Job, corpus: Corpus | None) -> Job:
    """Return the job with the commit of its teacher. Raise if the teacher uses other tokens than the student.

    A teacher whose logits are cached is not needed, so it is not checked.
    """
    if not job.method.runs_teacher:
        return job
    teacher = ModelFacts(teacher_section(job))
    if teacher.snapshot is not None and teacher.section.revision is None:
        job = job.with_teacher_revision(teacher.snapshot.revision)
    require_positions(job, teacher)
    if corpus is not None:
        require_same_tokenizer(teacher, corpus.tokenizer)
    elif (job.data.tokenizer or ModelFacts(job.model).has_tokenizer) and teacher.has_tokenizer:
        # Without the data, for example in `plan`, tokenizers may be missing. They are compared if both exist.
        require_same_tokenizer(teacher, tokenizer_of(job))
    return job
