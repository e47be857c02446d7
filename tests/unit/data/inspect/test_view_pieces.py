"""Pieces join to the text that the tokenizer decodes, and show what an eye would miss."""

from __future__ import annotations

import random

import pytest

from forerun.data.inspect.pieces import pieces, spelling_of, visible
from forerun.data.tokenizer import ByteTokenizer, Tokenizer

TEXT = "the naïve fox, 日本語 🙂\tplain \n  end"


@pytest.mark.parametrize("name", ["bytes", "byte_level", "with_fallback"])
def test_pieces_join_to_the_text_and_hold_every_token_once(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if name == "bytes" else request.getfixturevalue(name)
    ids = tokenizer.encode(TEXT).tolist()
    found = pieces(ids, spelling_of(tokenizer))
    assert "".join(one.text for one in found) == tokenizer.decode(ids) == TEXT
    assert [token for one in found for token in one.ids] == ids
    assert [one.position for one in found] == [sum(len(p.ids) for p in found[:n]) for n in range(len(found))]
    assert not any(one.special for one in found)


@pytest.mark.parametrize("name", ["bytes", "byte_level"])
def test_any_ids_join_as_the_tokenizer_decodes_them(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if name == "bytes" else request.getfixturevalue(name)
    spelling, draw = spelling_of(tokenizer), random.Random(5)
    plain = [token for token in range(tokenizer.vocab) if spelling.special(token) is None]
    for _ in range(200):
        ids = draw.choices(plain, k=12)
        text = "".join(one.text for one in pieces(ids, spelling))
        # Broken characters may count differently, piece by piece; all that is whole is the same.
        assert text.replace("\ufffd", "") == tokenizer.decode(ids).replace("\ufffd", "")


def test_a_character_of_several_tokens_is_one_piece() -> None:
    found = pieces(list("aé🙂".encode()), spelling_of(ByteTokenizer()), position=7)
    assert [(one.text, len(one.ids), one.position) for one in found] == [("a", 1, 7), ("é", 2, 8), ("🙂", 4, 10)]


def test_half_a_character_shows_its_bytes() -> None:
    spelling = spelling_of(ByteTokenizer())
    assert [one.shown for one in pieces([0xC3], spelling)] == ["‹c3›"]
    assert [one.shown for one in pieces([0xE6, 0x97, 256], spelling)] == ["‹e6 97›", "<|end|>"]
    assert [one.shown for one in pieces([0xFF, 0x61], spelling)] == ["‹ff›", "a"]


def test_a_character_half_learned_is_not_one_piece() -> None:
    found = pieces(list("é".encode()), spelling_of(ByteTokenizer()), [False, True])
    assert [(one.shown, one.learned) for one in found] == [("‹c3›", False), ("‹a9›", True)]


@pytest.mark.parametrize("name", ["byte_level", "with_fallback"])
def test_special_tokens_stand_by_name(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    found = pieces(tokenizer.encode("<|im_start|>the fox<|im_end|>").tolist(), spelling_of(tokenizer))
    assert [one.shown for one in found if one.special] == ["<|im_start|>", "<|im_end|>"]
    assert "".join(one.text for one in found if not one.special).strip() == "the fox"


def test_blanks_at_ends_and_hidden_signs_are_visible() -> None:
    assert visible("a b \n\tc  ") == "a b·⏎\n⇥\tc··"
    assert visible("\x1b[31m\r\n\u202ex\ufeff\xa0") == "‹1b›[31m‹0d›⏎\n‹202e›x‹feff›‹a0›"
    spelled = pieces([ord("a"), 32, 256, 32, ord("b")], spelling_of(ByteTokenizer()))
    assert [one.shown for one in spelled] == ["a", "·", "<|end|>", " ", "b"]
