"""Tokenizers trained on the spot, and a look at clean data that single tests spoil."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from forerun.data.inspect.corpus_report import CorpusReport, ExaminedDocuments, ExaminedRows, Lengths, SourceSummary
from forerun.data.tokenizer import Tokenizer, load_tokenizer

TEXTS = ("the fox slept and the dog ran", "naïve café, 日本語 🙂", "user\nassistant\nsystem\n")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As GPT-2's: many characters are several tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    inner.add_tokens(["plain"])  # added, and not special
    return _saved(inner, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def with_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As Llama 2's: words begin with a mark, and unknown characters are bytes."""
    words = ["▁the", "▁fox", "▁slept", "▁", "t", "h", "e", "!"]
    vocab = {name: n for n, name in enumerate([*SPECIAL, *(f"<0x{n:02X}>" for n in range(256)), *words])}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocab |= {"▁t": len(vocab), "▁th": len(vocab) + 1}
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    inner.add_special_tokens(SPECIAL)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _saved(inner, tmp_path_factory.mktemp("with_fallback"))


def _saved(inner: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    inner.save(str(path))
    return load_tokenizer(str(path))


@pytest.fixture
def clean() -> CorpusReport:
    """Nothing is wrong with it."""
    return CorpusReport(
        title="clean.yaml",
        sources=[SourceSummary("data", "1 file, jsonl, column messages", 1, 9000, 100, 4950)],
        form="messages",
        tokenizer="bytes:257",
        vocabulary=257,
        lengths=Lengths(np.arange(100, dtype=np.int64), 100),
        sequence=128,
        packing="whole",
        rows=40,
        padding_share=0.02,
        batch=8,
        seed=0,
        rows_examined=ExaminedRows(40, 40 * 128, 102, 2000, 0),
        documents_examined=ExaminedDocuments(documents=100, tokens=4950),
        steps=10,
    )
