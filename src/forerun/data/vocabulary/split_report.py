"""Figures about how tokenizers split text: bytes per token, tokens per word, unused tokens, and an example."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun.data.inspect.pieces import ByteSpelling, pieces, spelling_of
from forerun.data.tokenizer import Tokenizer
from forerun.data.tokens.coder import Coder, open_coder
from forerun.data.vocabulary.texts import SourceTexts
from forerun.units import MIB, Bytes, Count

MEASURED_BYTES = 64 * MIB  # of each side; a longer text changes the figures by less than their last digit
BATCH_CHARACTERS = MIB
LONGEST = 8
EXAMPLE_CHARACTERS = 240


@dataclass(frozen=True)
class SplitFigures:
    """Counts of one text under one tokenizer."""

    bytes: int = 0
    words: int = 0  # separated by white space
    tokens: int = 0

    @property
    def bytes_per_token(self) -> float:
        """The mean number of bytes of a token, or 0 without text."""
        return self.bytes / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_word(self) -> float:
        """The mean number of tokens of a word, or 0 without words."""
        return self.tokens / self.words if self.words else 0.0


@dataclass(frozen=True)
class TokenizerFigures:
    """How one tokenizer splits the texts.

    Attributes:
      name: the tokenizer, as the user wrote it.
      vocabulary: its number of ids.
      special: its number of special tokens.
      unused: its tokens that occur nowhere in the texts, without special tokens.
      train: figures of the texts that are not held out.
      held_out: figures of the held-out texts.
    """

    name: str
    vocabulary: int
    special: int
    unused: int
    train: SplitFigures
    held_out: SplitFigures

    @property
    def unused_share(self) -> float:
        """The share of unused tokens among all tokens that are not special."""
        return self.unused / max(1, self.vocabulary - self.special)


@dataclass(frozen=True)
class TokenizerReport:
    """How a tokenizer splits text, next to other tokenizers.

    Attributes:
      tokenizers: the tokenizer itself, then those that it is compared with. The last one reads single bytes.
      longest: the texts of its longest tokens, with visible characters.
      example: the beginning of a text, with a bar between two tokens.
      notes: facts that limit the figures, such as a text that is too short.
    """

    tokenizers: tuple[TokenizerFigures, ...]
    longest: tuple[str, ...]
    example: str
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        own = self.tokenizers[0]
        width = max(len("tokenizer"), *(len(one.name) for one in self.tokenizers))
        head = f"{'tokenizer':<{width}}  {'ids':>9}  {'bytes/token':>11}  {'held out':>8}  {'tokens/word':>11}  unused"
        rows = [
            f"{one.name:<{width}}  {one.vocabulary:>9,}  {one.train.bytes_per_token:>11.3f}  "
            f"{_or_dash(one.held_out.bytes_per_token):>8}  {one.train.tokens_per_word:>11.3f}  {one.unused_share:.1%}"
            for one in self.tokenizers
        ]
        text = f"text: {Bytes(own.train.bytes)}, {Count(own.train.words)} words, {Count(own.train.tokens)} tokens"
        held = f"; held out: {Bytes(own.held_out.bytes)}" if own.held_out.bytes else ""
        longest = "longest tokens: " + "  ".join(f"[{token}]" for token in self.longest)
        return [text + held, head, *rows, longest, "example:", *self.example.splitlines(), *self.notes]


def _or_dash(value: float) -> str:
    return f"{value:.3f}" if value else "-"


@dataclass
class _Counter:
    """Running figures of one tokenizer."""

    coder: Coder
    used: NDArray[np.bool_]
    train: list[int] = field(default_factory=lambda: [0, 0, 0])
    held_out: list[int] = field(default_factory=lambda: [0, 0, 0])

    def add(self, batch: Sequence[tuple[str, bool]]) -> None:
        for (text, held), ids in zip(batch, self.coder.encode_plain([text for text, _ in batch]), strict=True):
            side = self.held_out if held else self.train
            side[0] += len(text.encode("utf-8", errors="surrogatepass"))
            side[1] += len(text.split())
            side[2] += len(ids)
            self.used[ids] = True


def tokenizer_report(named: Sequence[tuple[str, Tokenizer]], texts: SourceTexts) -> TokenizerReport:
    """Return the report about the first tokenizer, compared with the others.

    Args:
      named: tokenizers with their names. The last one reads single bytes.
      texts: the texts. At most 64 MiB of each side are measured.
    """
    counters = [_Counter(open_coder(one.path), np.zeros(one.vocab, np.bool_)) for _, one in named]
    first: dict[bool, str] = {}
    cut = False
    for batch in _batches(texts):
        kept = []
        for text, held in batch:
            first.setdefault(held, text)
            side = counters[0].held_out if held else counters[0].train
            if side[0] < MEASURED_BYTES:
                kept.append((text, held))
            else:
                cut = True
        for counter in counters:
            counter.add(kept)
    found = tuple(_figures(name, one, counter) for (name, one), counter in zip(named, counters, strict=True))
    notes = [] if found[0].held_out.bytes else ["no text is held out: the text is too short"]
    if cut:
        notes.append(f"the figures are those of the first {Bytes(MEASURED_BYTES)}")
    example = first.get(True) or first.get(False) or ""
    own = named[0][1]
    return TokenizerReport(found, _longest(own), _example(own, counters[0].coder, example), tuple(notes))


def _batches(texts: SourceTexts) -> Iterable[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for text, held in texts.texts():
        batch.append((text, held))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _figures(name: str, tokenizer: Tokenizer, counter: _Counter) -> TokenizerFigures:
    special = {*tokenizer.specials.values(), tokenizer.eos}
    unused = sum(not used for token, used in enumerate(counter.used) if token not in special)
    train, held_out = SplitFigures(*counter.train), SplitFigures(*counter.held_out)
    return TokenizerFigures(name, tokenizer.vocab, len(special), unused, train, held_out)


def _longest(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the longest tokens as visible text, the longest first."""
    spelling = spelling_of(tokenizer)
    plain = [token for token in range(tokenizer.vocab) if spelling.special(token) is None and token != tokenizer.eos]

    def length(token: int) -> int:
        return len(spelling.raw(token) if isinstance(spelling, ByteSpelling) else tokenizer.decode([token]).encode())

    ordered = sorted(plain, key=lambda token: (-length(token), token))
    return tuple(pieces([token], spelling)[0].shown.replace("\n", "") for token in ordered[:LONGEST])


def _example(tokenizer: Tokenizer, coder: Coder, text: str) -> str:
    """Return the beginning of a text with a bar between two tokens."""
    ids = coder.encode_plain([text[:EXAMPLE_CHARACTERS]])[0].tolist()
    return "|".join(piece.shown for piece in pieces(ids, spelling_of(tokenizer)))
