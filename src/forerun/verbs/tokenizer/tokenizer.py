"""Tokenizers: train one on text, and report how tokenizers split text."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from forerun.errors import UserError
from forerun.reporter import SILENT, LineReporter
from forerun.verbs.job_files import load_job, prepared
from forerun.verbs.option_types import Count, Texts, Value

if TYPE_CHECKING:
    from forerun.config.data_section import Data
    from forerun.config.schema import Job
    from forerun.data.vocabulary.split_report import TokenizerReport
    from forerun.verbs.tokenizer.train_tokenizer import TrainedTokenizer

    TextSource = Job | str | os.PathLike[str]

Splitting = Literal["qwen2", "llama3", "gpt2"]
Normalizer = Literal["none", "nfc"]


def train_tokenizer(
    data: TextSource | Sequence[str | os.PathLike[str]],
    to: str | os.PathLike[str],
    *,
    vocab: Count = 8192,
    end: Annotated[str, Value("TEXT")] = "<|endoftext|>",
    special: Texts = (),
    chat_template: Annotated[str | os.PathLike[str], Value("FILE")] | None = "chatml",
    splitting: Annotated[Splitting, Value(option="split")] = "qwen2",
    normalize: Normalizer = "none",
    compare: Annotated[Sequence[str], Value("TOKENIZER", is_repeatable=True)] = (),
    progress: bool = True,
) -> TrainedTokenizer:
    """Train a byte-level BPE tokenizer on text, and write it as a folder for `data.tokenizer` and transformers.

    The same text and settings always give the same files. Held-out documents are not trained on: those of
    `data.validation`, or else 2 % of the text.

    Args:
      data: a file, folder or glob as in `data.path`, several of them, a job, or the path of a job file
      to: with train: folder to write; it must be empty or not exist
      vocab: with train: number of tokens, with the 256 bytes and the special tokens
      end: with train: token that ends a document
      special: with train: special token, beside those of the template; can be repeated
      chat_template: with train: chatml, a Jinja file, or none
      splitting: with train: how text is split into words before merging; qwen2 separates digits
      normalize: with train: nfc composes accents; none keeps all bytes
      compare: another tokenizer for the report: folder, file or hub name; can be repeated
      progress: print progress to stderr

    Returns:
      The folder, and a report of how the tokenizer splits the text.

    Raises:
      UserError: The text cannot be read, a setting is not possible, or the folder is not empty.
    """
    from forerun.data.chat_template import template_named
    from forerun.data.vocabulary.training import TokenizerSettings, chat_tokens
    from forerun.verbs.tokenizer import train_tokenizer as training

    template = None if chat_template is None else template_named(os.fspath(chat_template), "chat_template")
    choices = {"splitting": (splitting, get_args(Splitting)), "normalize": (normalize, get_args(Normalizer))}
    for name, (value, known) in choices.items():
        if value not in known:
            raise UserError(
                "E-COMMAND-030",
                f"{name}={value!r} is not possible",
                why=f"the values are {', '.join(known)}",
                fix=f"use {name}={known[0]!r}, or another of these values",
            )
    settings = TokenizerSettings(vocab, end, chat_tokens(template, special), splitting, normalize)
    return training.train_tokenizer(
        _data_of(data),
        Path(to),
        settings,
        template=template,
        compare=compare,
        reporter=LineReporter(sys.stderr) if progress else SILENT,
    )


def inspect_tokenizer(
    tokenizer: str | os.PathLike[str],
    data: TextSource | Sequence[str | os.PathLike[str]],
    *,
    compare: Sequence[str] = (),
) -> TokenizerReport:
    """Return how a tokenizer splits text, next to other tokenizers and to bytes.

    Args:
      tokenizer: a folder, a tokenizer.json, a hub name or bytes, as in `data.tokenizer`.
      data: the text, as in `train_tokenizer`.
      compare: other tokenizers.
    """
    from forerun.verbs.tokenizer import train_tokenizer as training

    return training.inspect_tokenizer(os.fspath(tokenizer), _data_of(data), compare)


def _data_of(source: TextSource | Sequence[str | os.PathLike[str]]) -> Data:
    """Return the data section of a job, of a job file, or of files with text."""
    from forerun.config.data_section import Data, Part
    from forerun.config.schema import Job

    if isinstance(source, Job):
        return prepared(source).data
    places = [source] if isinstance(source, str | os.PathLike) else list(source)
    names = [os.fspath(place) for place in places]
    if len(names) == 1 and names[0].endswith((".yaml", ".yml")):
        return load_job(names[0]).data
    if len(names) == 1:
        return Data(path=names[0])
    return Data(mixture={f"part{number}": Part(path=name) for number, name in enumerate(names)})
