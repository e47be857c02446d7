"""Training of a byte-level BPE tokenizer with the library `tokenizers`, and the files that transformers reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forerun.data.tokenizer import CONFIG_NAME, FILE_NAME
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.hub.chat.template import CHATML, TEMPLATE_NAME
from forerun.interrupt import cleanup

if TYPE_CHECKING:
    import tokenizers

Splitting = Literal["qwen2", "llama3", "gpt2"]
END, CHATML_TOKENS = "<|endoftext|>", ("<|im_start|>", "<|im_end|>")
BYTES = 256
MIN_FREQUENCY = 2  # a pair that occurs once saves nothing on other text

# The regular expressions of Qwen 2 and Llama 3, in which only the runs of digits differ.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: dict[str, str | None] = {
    "qwen2": _WORDS.replace("DIGITS", r"\p{N}"),
    "llama3": _WORDS.replace("DIGITS", r"\p{N}{1,3}"),
    "gpt2": None,  # built into the library
}


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings of a new tokenizer.

    Attributes:
      vocab: the number of tokens, with the 256 bytes and the special tokens.
      end: the token that ends a document.
      special: other special tokens, in the order of their ids.
      splitting: how text is split into words before merging: as in Qwen 2 (each digit is a word), Llama 3 (up to three
        digits are one) or GPT-2.
      normalize: `nfc` composes accents before the text is split; `none` keeps every byte.
    """

    vocab: int
    end: str = END
    special: tuple[str, ...] = CHATML_TOKENS
    splitting: Splitting = "qwen2"
    normalize: Literal["none", "nfc"] = "none"

    def __post_init__(self) -> None:
        names = (self.end, *self.special)
        double = next((name for n, name in enumerate(names) if name in names[:n] or not name.strip()), None)
        if double is not None:
            raise UserError(
                "E-DATA-143",
                f"the special token {double!r} cannot be used",
                why="it is empty, or it is given twice",
                fix="give every special token another text",
            )
        if self.vocab < BYTES + len(names):
            raise UserError(
                "E-DATA-144",
                f"a vocabulary of {self.vocab} is too small",
                why=f"the {BYTES} bytes and {len(names)} special tokens have an id each",
                fix=f"ask for at least {BYTES + len(names)} tokens; 8192 is common for small models",
            )


def train(texts: Iterator[str], settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """Return a tokenizer that was trained on the texts. The same texts in the same order give the same tokenizer.

    The memory depends on the number of different words in the texts, and not on their length.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = untrained(settings)
    # Special tokens get the first ids. The library sorts the alphabet, so the other ids do not depend on its order.
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[tokenizers.AddedToken(name, special=True) for name in (settings.end, *settings.special)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.decoder = decoders.ByteLevel()
    assert isinstance(made.model, models.BPE)
    return made


def untrained(settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """Return a tokenizer with the normalizer and the pre-tokenizer of the settings, and without tokens."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers

    made = tokenizers.Tokenizer(models.BPE())
    if settings.normalize == "nfc":
        made.normalizer = normalizers.NFC()
    pattern = PATTERNS[settings.splitting]
    if pattern is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return made


def chat_tokens(template: str | None, special: Sequence[str] | None) -> tuple[str, ...]:
    """Return the special tokens beside the end token: those of ChatML for its template, then those that are given."""
    own = CHATML_TOKENS if template == CHATML else ()
    return tuple(dict.fromkeys([*own, *(special or ())]))


def require_free(folder: Path) -> None:
    """Raise a UserError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "E-DATA-145",
            f"{folder} exists already",
            why="a new tokenizer never replaces files: models that were trained with them would read other tokens",
            fix="remove it, or give another folder after --to",
        )


def write_tokenizer_folder(made: tokenizers.Tokenizer, folder: Path, end: str, template: str | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, which transformers reads."""
    require_free(folder)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        with cleanup(lambda: shutil.rmtree(part, ignore_errors=True)):
            made.save(str(part / FILE_NAME))
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "eos_token": end,
            }
            atomic_write(part / CONFIG_NAME, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
            if template is not None:
                atomic_write(part / TEMPLATE_NAME, template)
            if folder.exists():
                folder.rmdir()  # empty
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
