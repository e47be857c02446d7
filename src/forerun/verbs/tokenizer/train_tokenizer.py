"""`forerun tokenizer`: train a tokenizer on text, write its files, and report how tokenizers split text."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forerun.config.schema import Data
from forerun.data.tokenizer import FILE_NAME, load_tokenizer
from forerun.data.vocabulary.split_report import TokenizerReport, tokenizer_report
from forerun.data.vocabulary.texts import SourceTexts, open_texts
from forerun.data.vocabulary.training import TokenizerSettings, require_free, train, write_tokenizer_folder
from forerun.errors import UserError
from forerun.reporter import SILENT, Reporter
from forerun.units import Seconds

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

    def __repr__(self) -> str:
        return "\n".join([f"{self.folder}: {self.vocabulary:,} tokens, {self.sha256[:16]}", *self.report.lines()])


def train_tokenizer(
    data: Data,
    to: Path,
    settings: TokenizerSettings,
    *,
    template: str | None,
    compare: Sequence[str] = (),
    reporter: Reporter = SILENT,
) -> TrainedTokenizer:
    """Train a tokenizer on the texts of a data section that are not held out, and write it.

    Args:
      data: the data section.
      to: the folder to write. It must be empty or not exist.
      settings: the vocabulary, the special tokens and the splitting.
      template: the source of the chat template, or None for a tokenizer without one.
      compare: other tokenizers for the report, as in `data.tokenizer`.
      reporter: shows how much text was read, and a line every ten seconds while pairs are merged.

    Raises:
      UserError: the texts cannot be read, the settings are not possible, or the folder is not empty.
    """
    require_free(to)
    texts = open_texts(data)
    others = [
        (_short(name), load_tokenizer(name)) for name in compare
    ]  # a wrong name must not be found after the training
    with _heartbeat(reporter) as merging:
        made = train(_training_texts(texts, reporter, merging), settings)
    write_tokenizer_folder(made, to, settings.end, template)
    found = load_tokenizer(str(to.absolute()))
    named = [(to.name, found), *others, ("bytes", load_tokenizer("bytes"))]
    warnings = []
    if found.vocab < settings.vocab:
        warnings.append(
            f"the vocabulary has {found.vocab:,} tokens, not {settings.vocab:,}: no other pair occurs twice"
        )
    if texts.skipped:
        warnings.append(f"{texts.skipped} bad rows were skipped")
    digest = hashlib.sha256((to / FILE_NAME).read_bytes()).hexdigest()
    return TrainedTokenizer(to, found.vocab, digest, tokenizer_report(named, texts), tuple(warnings))


def inspect_tokenizer(tokenizer: str, data: Data, compare: Sequence[str] = ()) -> TokenizerReport:
    """Return how an existing tokenizer splits the texts of a data section, next to other tokenizers."""
    names = [tokenizer, *compare, *([] if tokenizer == "bytes" else ["bytes"])]
    return tokenizer_report([(_short(name), load_tokenizer(name)) for name in dict.fromkeys(names)], open_texts(data))


def _short(name: str) -> str:
    """Return the name of a tokenizer for the report, without the folders of this machine."""
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
