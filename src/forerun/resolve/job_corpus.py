"""The corpus of a job: its data, tokenized with the tokenizer and the chat template of its model."""

from __future__ import annotations

from forerun.config import schema
from forerun.data import corpus
from forerun.data.corpus import CHAT_FORMS, Corpus, Dialect
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import special_text, tokenizer_files
from forerun.errors import UserError
from forerun.hub.chat.template import chat_template
from forerun.hub.snapshot import Snapshot
from forerun.models.sizes import HUB_NAMES
from forerun.reporter import Phase
from forerun.resolve.resolve_model import tokenizer_of
from forerun.resolve.resolved_job import ResolvedJob
from forerun.resolve.tokenizer_checks import require_vocab

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
EXAMPLE_CHECKPOINT = "Qwen/Qwen3-0.6B"


def dialect_of(resolved: ResolvedJob) -> Dialect:
    """Return the tokenizer of the job, with the chat template and the special tokens of its files."""
    data, base = resolved.job.data, resolved.model_facts.snapshot
    return Dialect(tokenizer_of(resolved), model_template(data, base), model_specials(data, base))


def own_tokenizer_files(data: schema.Data | None) -> Snapshot | None:
    """Return the folder or the repository that `data.tokenizer` names; None for bytes, a single file or no job."""
    return None if data is None or data.tokenizer is None else tokenizer_files(data.tokenizer)


def model_template(data: schema.Data | None, base: Snapshot | None) -> str | None:
    """Return the chat template of the job's tokenizer, else that of the checkpoint's files, else None.

    Args:
      data: the data section of the job, or None for a model that is not a run.
      base: the files of the model or of its base, if there are any.
    """
    own = own_tokenizer_files(data)
    template = None if own is None else chat_template(own.folder)
    return chat_template(base.folder) if template is None and base is not None else template


def model_specials(data: schema.Data | None, base: Snapshot | None) -> dict[str, str]:
    """Return the texts of special tokens for `model_template`. Those of the job's tokenizer have priority."""
    return special_texts(base) | special_texts(own_tokenizer_files(data))


def special_texts(snapshot: Snapshot | None) -> dict[str, str]:
    """Return the texts of special tokens, by the names that chat templates use."""
    content = (snapshot.json("tokenizer_config.json") if snapshot else None) or {}
    return {name: text for name in SPECIAL if (text := special_text(content.get(name))) is not None}


def open_corpus(resolved: ResolvedJob, phase: Phase | None = None, host: tuple[int, int] = (0, 1)) -> Corpus:
    """Return the job's corpus. Tokenizes the data if no token store exists for it.

    Args:
      resolved: the job. Its steps need not be known.
      phase: shows the progress of tokenizing.
      host: this host and the number of hosts, which share the work on a store in a bucket.

    Raises:
      UserError: the data cannot be used, or contains token ids beyond the model's vocabulary.
    """
    require_chosen_tokenizer(resolved)
    job, dialect, vocab = resolved.job, dialect_of(resolved), resolved.vocab
    require_vocab(dialect.tokenizer, vocab)
    opened = corpus.open_corpus(
        job.data,
        dialect,
        sequence=job.sequence,
        vocab=vocab,
        pairs=job.method.data_is_pairs,
        phase=phase,
        host=host,
    )
    if opened.largest >= vocab:
        raise UserError(
            "E-RUN-016",
            f"the data contains the token id {opened.largest}, the model's vocabulary ends at {vocab - 1}",
            why="ids beyond the embedding table would be clamped silently on the device",
            fix=f"use the model's own tokenizer, or set model.vocab={opened.largest + 1}",
        )
    return opened


def with_steps(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with its number of steps. Opens the data only if the number follows from it."""
    return resolved.with_data(open_corpus(resolved)) if resolved.job.steps is None else resolved


def require_chosen_tokenizer(resolved: ResolvedJob) -> None:
    """Raise if the data has conversations, the weights are random and the job sets no tokenizer.

    The default tokenizer reads single bytes, and a few thousand conversations cannot teach a language. The user
    probably wanted to fine-tune a checkpoint. `data.tokenizer: bytes` confirms the combination. The data files are
    opened, but not tokenized.
    """
    model, data = resolved.job.model, resolved.job.data
    if resolved.model_facts.is_checkpoint or data.tokenizer is not None:
        return
    for part in data.parts.values():
        source = open_source(part)
        if source.form in CHAT_FORMS:
            kind = "preference pairs" if source.form == "chosen/rejected" else "conversations"
            checkpoint = HUB_NAMES.get(model.name or "", EXAMPLE_CHECKPOINT)
            raise UserError(
                "E-RUN-037",
                f"{source.files[0].name}: {kind} for a model with random weights and a byte tokenizer",
                why=f"{model.name or 'a model without a name'} is not a checkpoint: it would have to learn the "
                "language from this data, byte by byte",
                fix=f"fine-tune a pretrained model: model={checkpoint}; or, to train from scratch, choose a tokenizer: "
                "data.tokenizer=owner/name, a folder with a tokenizer.json, or bytes",
            )
