from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.data.stream import token_stream
from forerun.data.tokenizer import ByteTokenizer
from forerun.errors import UserError


class Wide(ByteTokenizer):
    name = "wide"
    vocab = 70_000
    eos = 69_999


class Counting(ByteTokenizer):
    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str) -> np.ndarray:
        self.calls += 1
        return super().encode(text)


def test_each_document_is_followed_by_its_end_and_empty_ones_are_none() -> None:
    stream = token_stream(["ab", "", "c"], ByteTokenizer())
    assert stream.tokens.tolist() == [97, 98, 256, 99, 256]
    assert stream.offsets.tolist() == [0, 3, 5]
    assert (stream.documents, stream.tokens.dtype) == (2, np.uint16)


def test_a_large_vocabulary_is_not_cut_to_sixteen_bits() -> None:
    assert token_stream(["a"], Wide()).tokens.tolist() == [97, 69_999]


def test_the_cache_is_read_back_and_only_for_the_same_contents(tmp_path: Path) -> None:
    tokenizer = Counting()
    first = token_stream(["ab", "c"], tokenizer, tmp_path)
    again = token_stream(["ab", "c"], tokenizer, tmp_path)
    assert tokenizer.calls == 2
    assert isinstance(again.tokens, np.memmap)
    assert again.tokens.tolist() == first.tokens.tolist() == [97, 98, 256, 99, 256]
    assert again.offsets.tolist() == [0, 3, 5]
    assert token_stream(["a", "bc"], tokenizer, tmp_path).offsets.tolist() == [0, 2, 5]
    assert token_stream(["ab", "c"], Wide(), tmp_path).tokens[-1] == 69_999
    assert not list(tmp_path.glob("*.part"))


def test_only_empty_documents_are_an_error() -> None:
    with pytest.raises(UserError, match="every file is empty"):
        token_stream(["", ""], ByteTokenizer())
