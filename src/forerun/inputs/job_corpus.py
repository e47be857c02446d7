"""The corpus of a job: its data, tokenized with the tokenizer and the chat template of its model."""

from __future__ import annotations

from forerun.config.schema import Job
from forerun.data import corpus
from forerun.data.corpus import Corpus, Dialect, OnProgress
from forerun.data.new_tokens import extended_tokenizer
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer, load_tokenizer, special_text, tokenizer_files
from forerun.data.tokens.build import BuildProgress
from forerun.errors import UserError
from forerun.hub.chat.template import chat_template
from forerun.hub.snapshot import Snapshot
from forerun.inputs.new_tokens import require_checkpoint, vocab_with_new_tokens
from forerun.inputs.starting_weights import require_chosen_tokenizer
from forerun.models.pretrained import config_of, is_checkpoint, pretrained
from forerun.models.sizes import is_plugin
from forerun.track.display.display import Display, Phase
from forerun.units import Bytes, Count, Seconds

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokenizer_of(job: Job) -> Tokenizer:
    """Return the tokenizer that the job names, else the checkpoint's own, else the byte tokenizer.

    New tokens of the job are added to it.
    """
    require_checkpoint(job)
    if job.data.tokenizer is None and is_checkpoint(job.model):
        found = checkpoint_tokenizer(pretrained(job.model).snapshot)
    else:
        found = load_tokenizer(job.data.tokenizer or "bytes")
    if not job.model.added_tokens:
        return found
    return extended_tokenizer(found, job.model.new_tokens or (), job.model.new_special_tokens or ())


def dialect_of(job: Job) -> Dialect:
    """Return the tokenizer of the job, with the chat template and the special tokens of its files."""
    base = pretrained(job.model).snapshot if is_checkpoint(job.model) else None
    return Dialect(tokenizer_of(job), model_template(job, base), model_specials(job, base))


def own_tokenizer_files(job: Job | None) -> Snapshot | None:
    """Return the folder or the repository that `data.tokenizer` names; None for bytes, a single file or no job."""
    return None if job is None or job.data.tokenizer is None else tokenizer_files(job.data.tokenizer)


def model_template(job: Job | None, base: Snapshot | None) -> str | None:
    """Return the chat template of the job's tokenizer, else that of the checkpoint's files, else None.

    Args:
      job: the job, or None for a model that is not a run.
      base: the files of the model or of its base, if there are any.
    """
    own = own_tokenizer_files(job)
    found = None if own is None else chat_template(own.folder)
    return chat_template(base.folder) if found is None and base is not None else found


def model_specials(job: Job | None, base: Snapshot | None) -> dict[str, str]:
    """Return the texts of special tokens for `model_template`. Those of the job's tokenizer have priority."""
    return special_texts(base) | special_texts(own_tokenizer_files(job))


def special_texts(snapshot: Snapshot | None) -> dict[str, str]:
    """Return the texts of special tokens, by the names that chat templates use."""
    content = (snapshot.json("tokenizer_config.json") if snapshot else None) or {}
    return {name: text for name in SPECIAL if (text := special_text(content.get(name))) is not None}


def open_corpus(job: Job, on_progress: OnProgress | None = None, host: tuple[int, int] = (0, 1)) -> Corpus:
    """Return the job's corpus. Tokenizes the data if no token store exists for it.

    Args:
      job: the job.
      on_progress: called with the progress of tokenizing.
      host: this host and the number of hosts, which share the work on a store in a bucket.

    Raises:
      UserError: the data cannot be used, or contains token ids beyond the model's vocabulary.
    """
    require_chosen_tokenizer(job)
    vocab = model_vocab(job)
    dialect = dialect_of(job)
    if vocab is not None:
        require_vocab(dialect.tokenizer, vocab)
    found = corpus.open_corpus(
        job.data,
        dialect,
        sequence=job.sequence,
        vocab=vocab,
        pairs=job.method.data_is_pairs,
        on_progress=on_progress,
        host=host,
    )
    require_ids(found.largest, vocab)
    return found


def require_ids(largest: int, vocab: int | None) -> None:
    """Raise if the largest token id of the data is beyond the model's vocabulary. None: it is not limited."""
    if vocab is not None and largest >= vocab:
        raise UserError(
            "E-RUN-016",
            f"the data contains the token id {largest}, the model's vocabulary ends at {vocab - 1}",
            why="ids beyond the embedding table would be clamped silently on the device",
            fix=f"use the model's own tokenizer, or set model.vocab={largest + 1}",
        )


def require_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise if the tokenizer has more ids than the model's vocabulary."""
    if tokenizer.vocab > vocab:
        raise UserError(
            "E-RUN-017",
            f"the tokenizer has {tokenizer.vocab} ids, the model's vocabulary only {vocab}",
            why="ids beyond the embedding table would be clamped silently on the device",
            fix=f"use the model's own tokenizer, or set model.vocab={tokenizer.vocab} for random weights; "
            "model.new_tokens adds tokens to a checkpoint",
        )


def model_vocab(job: Job) -> int | None:
    """Return the size of the model's vocabulary, or None if it follows from the tokenizer.

    The vocabulary of a named size follows from the tokenizer if the job names one. Without one, the tokens are bytes,
    and the size keeps its published vocabulary.
    """
    require_checkpoint(job)
    if job.model.vocab is not None or job.model.name is None or is_plugin(job.model):
        return job.model.vocab
    if not is_checkpoint(job.model) and job.data.tokenizer not in (None, "bytes"):
        return None
    if job.model.added_tokens:
        return vocab_with_new_tokens(job, tokenizer_of(job))
    return config_of(job.model).vocab


def open_corpus_with_progress(job: Job, display: Display, host: tuple[int, int] = (0, 1)) -> Corpus:
    """Return the job's corpus. Show the progress, a summary and warnings on the display."""
    with display.phase("data") as phase:
        found = open_corpus(job, progress_callback(phase), host)
        first, *others = found.lines()
        phase.detail = first
    for line in others:
        display.say(f"data  {line}")
    for text in found.warnings:
        display.warn(text)
    return found


def progress_callback(phase: Phase) -> OnProgress:
    """Return a callback that shows the progress of tokenizing in the line of the phase."""

    def report(name: str, progress: BuildProgress) -> None:
        phase.detail = described(name, progress)

    return report


def described(name: str, progress: BuildProgress) -> str:
    """Return a line such as `tokenizing data: 45 % of 1.2 GB  310M tokens  eta 2 min`."""
    share = progress.done_bytes / max(1, progress.total_bytes)
    eta = "" if progress.eta_seconds is None else f"  eta {Seconds(progress.eta_seconds)}"
    return f"tokenizing {name}: {share:.0%} of {Bytes(progress.total_bytes)}  {Count(progress.tokens)} tokens{eta}"
