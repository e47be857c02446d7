"""Tokenizers: train one on text, and report how tokenizers split text."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from forerun.errors import UserError
from forerun.reporter import SILENT, LineReporter, Reporter
from forerun.units import Seconds
from forerun.verbs.job_files import load_job, prepared
from forerun.verbs.option_types import Count, Texts, Value

if TYPE_CHECKING:
    from forerun.config.data_section import Data
    from forerun.config.schema import Job
    from forerun.data.vocabulary.split_report import TokenizerReport
    from forerun.data.vocabulary.texts import SourceTexts

    TextSource = Job | str | os.PathLike[str]

Splitting = Literal["qwen2", "llama3", "gpt2"]
Normalizer = Literal["none", "nfc"]
BEAT_SECONDS = 10.0


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer that was trained and written.

    Attributes:
      folder: the folder with tokenizer.json, tokenizer_config.json and, if it has one, chat_template.jinja.
      vocabulary: the number of ids. It is smaller than the one that was asked for if the text is too short.
      sha256: the digest of tokenizer.json. The same text and settings give the same digest.
      report: how the tokenizer splits the text.
      warnings: what differs from the request, and rows that were skipped.
    """

    folder: Path
    vocabulary: int
    sha256: str
    report: TokenizerReport
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(
            [
                *self.report.lines(),
                f"done: {self.folder}  {self.vocabulary:,} tokens  {self.sha256[:16]}",
                f"      job: data.tokenizer={self.folder}; transformers: "
                f"AutoTokenizer.from_pretrained({str(self.folder)!r})",
            ]
        )

    def __repr__(self) -> str:
        return "\n".join([f"{self.folder}: {self.vocabulary:,} tokens, {self.sha256[:16]}", *self.report.lines()])


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
    from forerun.data.tokenizer import FILE_NAME, load_tokenizer
    from forerun.data.vocabulary.split_report import tokenizer_report
    from forerun.data.vocabulary.texts import open_texts
    from forerun.data.vocabulary.training import TokenizerSettings, chat_tokens, require_free, write_tokenizer_folder
    from forerun.data.vocabulary.training import train as train_vocabulary

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
    reporter, folder = LineReporter(sys.stderr) if progress else SILENT, Path(to)
    require_free(folder)
    texts = open_texts(_data_of(data))
    # A wrong name must be found before the training.
    others = [(_short(name), load_tokenizer(name)) for name in compare]
    with _heartbeat(reporter) as merging:
        trained = train_vocabulary(_training_texts(texts, reporter, merging), settings)
    write_tokenizer_folder(trained, folder, end, template)
    written = load_tokenizer(str(folder.absolute()))
    named = [(folder.name, written), *others, ("bytes", load_tokenizer("bytes"))]
    warnings = []
    if written.vocab < vocab:
        warnings.append(f"the vocabulary has {written.vocab:,} tokens, not {vocab:,}: no other pair occurs twice")
    if texts.skipped:
        warnings.append(f"{texts.skipped} bad rows were skipped")
    digest = hashlib.sha256((folder / FILE_NAME).read_bytes()).hexdigest()
    return TrainedTokenizer(folder, written.vocab, digest, tokenizer_report(named, texts), tuple(warnings))


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
    from forerun.data.tokenizer import load_tokenizer
    from forerun.data.vocabulary.split_report import tokenizer_report
    from forerun.data.vocabulary.texts import open_texts

    name = os.fspath(tokenizer)
    names = dict.fromkeys([name, *compare, *([] if name == "bytes" else ["bytes"])])
    return tokenizer_report([(_short(name), load_tokenizer(name)) for name in names], open_texts(_data_of(data)))


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


def _short(name: str) -> str:
    """Return the name of a tokenizer for the report, without the folders of this machine."""
    from forerun.data.tokenizer import FILE_NAME

    path = Path(name)
    if not path.is_absolute():
        return name
    return f"{path.parent.name}/{path.name}" if path.name == FILE_NAME else path.name


def _training_texts(texts: SourceTexts, reporter: Reporter, merging: threading.Event) -> Iterator[str]:
    found = False
    for text, held in texts.texts(reporter):
        if not held:
            found = True
            yield text
    merging.set()
    if not found:
        raise UserError(
            "E-DATA-146",
            "the data has no text to train a tokenizer on",
            why="every text is empty or held out",
            fix="name more text, or lower data.validation",
        )


@contextmanager
def _heartbeat(reporter: Reporter) -> Iterator[threading.Event]:
    """Yield an event. From its `set` to the end of the block, a line is shown every ten seconds.

    The library merges pairs in one call, without the lock of Python, and reports no progress.
    """
    merging, done = threading.Event(), threading.Event()

    def beat() -> None:
        merging.wait()
        spent = 0.0
        while not done.wait(BEAT_SECONDS):
            spent += BEAT_SECONDS
            reporter.info(f"merging pairs of tokens: {Seconds(spent)}")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield merging
    finally:
        done.set()
        merging.set()
        thread.join()
