"""A job's data as the loop needs it: read in the model's own dialect, with progress where people can see it."""

from __future__ import annotations

import time

from forerun.config.schema import Job
from forerun.data import corpus
from forerun.data.corpus import Corpus, Dialect, OnProgress
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer, load_tokenizer, special_text
from forerun.data.tokens.build import Progress
from forerun.errors import UserError
from forerun.hub.chat import chat_template
from forerun.hub.snapshot import Snapshot
from forerun.loop.starting_weights import require_chosen_tokenizer
from forerun.models.pretrained import config_of, is_checkpoint, pretrained
from forerun.models.sizes import is_plugin
from forerun.track.display import Display, Phase
from forerun.units import Bytes, Count, Seconds

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
EVERY_SECONDS = 30.0


def tokenizer_of(job: Job) -> Tokenizer:
    """The job's, or the checkpoint's own, or plain bytes."""
    if job.data.tokenizer is None and is_checkpoint(job.model):
        return checkpoint_tokenizer(pretrained(job.model).snapshot)
    return load_tokenizer(job.data.tokenizer or "bytes")


def dialect_of(job: Job) -> Dialect:
    """Tokenizer, chat template and special tokens: the job's where it names them, else the checkpoint's."""
    tokenizer = tokenizer_of(job)
    if not is_checkpoint(job.model):
        return Dialect(tokenizer)
    snapshot = pretrained(job.model).snapshot
    return Dialect(tokenizer, chat_template(snapshot.folder), special_texts(snapshot))


def special_texts(snapshot: Snapshot | None) -> dict[str, str]:
    """The texts of special tokens, which chat templates ask for by name."""
    content = (snapshot.json("tokenizer_config.json") if snapshot else None) or {}
    return {name: text for name in SPECIAL if (text := special_text(content.get(name))) is not None}


def open_corpus(job: Job, on_progress: OnProgress | None = None) -> Corpus:
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
        pairs=job.preferences is not None,
        on_progress=on_progress,
    )
    if vocab is not None and found.largest >= vocab:
        raise UserError(
            f"the data holds the token id {found.largest}, the model's vocabulary ends at {vocab - 1}",
            why="ids beyond the embedding table would be clamped without a word on the device",
            fix=f"use the model's own tokenizer, or set model.vocab={found.largest + 1}",
        )
    return found


def require_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """Token ids beyond the embedding would be clamped silently on the device."""
    if tokenizer.vocab > vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab} ids, the model's vocabulary only {vocab}",
            why="ids beyond the embedding table would be clamped without a word on the device",
            fix=f"use the model's own tokenizer, or set model.vocab={tokenizer.vocab}",
        )


def model_vocab(job: Job) -> int | None:
    """What the job says of it; None if it follows from the tokenizer."""
    if job.model.vocab is not None or job.model.name is None or is_plugin(job.model):
        return job.model.vocab
    return config_of(job.model).vocab


def shown_corpus(job: Job, display: Display) -> Corpus:
    """The corpus, opened as a phase that tells its progress and, at its end, what was found."""
    with display.phase("data") as phase:
        found = open_corpus(job, progress_in(phase, display))
        first, *others = found.lines()
        phase.detail = first
    for line in others:
        display.say(f"data  {line}")
    for text in found.warnings:
        display.warn(text)
    return found


def progress_in(phase: Phase, display: Display) -> OnProgress:
    """Progress of tokenizing: live beside the phase's name, and as a line now and then."""
    said = time.monotonic()

    def report(name: str, progress: Progress) -> None:
        nonlocal said
        phase.detail = described(name, progress)
        if time.monotonic() - said > EVERY_SECONDS:
            said = time.monotonic()
            display.say(phase.detail)

    return report


def described(name: str, progress: Progress) -> str:
    """`tokenizing data: 45 % of 1.2 GB  310M tokens  eta 2 min`."""
    share = progress.done_bytes / max(1, progress.total_bytes)
    eta = "" if progress.eta_seconds is None else f"  eta {Seconds(progress.eta_seconds)}"
    return f"tokenizing {name}: {share:.0%} of {Bytes(progress.total_bytes)}  {Count(progress.tokens)} tokens{eta}"
