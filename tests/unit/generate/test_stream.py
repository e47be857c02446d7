"""."""

from __future__ import annotations

import random

import pytest
import tokenizers

from forerun.data.tokenizer import ByteTokenizer
from forerun.generate.stream import TextStream

TEXT = "Grüße aus Köln: naïve café, 東京 🚀🚀 and 👩‍🚀 — done. \N{REPLACEMENT CHARACTER} <stop> not that"
BYTES = ByteTokenizer()


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [*map(stream.push, ids), stream.finish()]


@pytest.fixture(scope="module", params=["byte-level", "metaspace"])
def trained(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    """Two kinds that split characters over tokens: GPT-2's bytes, and Llama 2's pieces with byte fallback."""
    if request.param == "byte-level":
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        made.train_from_iterator(["some plain words and others aus Köln"] * 9, trainer)
        return made
    letters = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {piece: n for n, piece in enumerate(["<unk>", *letters, "▁a", "▁an", "▁and"])}
    merges = [("▁", "a"), ("▁a", "n"), ("▁an", "d")]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def test_pieces_make_the_whole_text(trained: tokenizers.Tokenizer) -> None:
    ids = trained.encode(TEXT).ids
    found = pieces(TextStream(trained.decode), ids)
    assert "".join(found) == trained.decode(ids) == TEXT
    assert len([piece for piece in found if piece]) > 20, "it must come in pieces"


def test_a_text_after_a_prompt_keeps_its_space(trained: tokenizers.Tokenizer) -> None:
    ids = trained.encode("one and another").ids
    whole = trained.decode(ids)
    for cut in range(1, len(ids)):
        before = trained.decode(ids[:cut])
        if before.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        stream = TextStream(trained.decode, prompt=ids[:cut])
        assert before + "".join(pieces(stream, ids[cut:])) == whole


def test_no_half_character_is_shown() -> None:
    stream = TextStream(BYTES.decode)
    shown = [stream.push(byte) for byte in "a🚀é".encode()]
    assert shown == ["a", "", "", "", "🚀", "", "é"]
    assert stream.finish() == ""


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    stream = TextStream(BYTES.decode)
    assert [stream.push(byte) for byte in (97, 0xF0, 0x9F)] == ["a", "", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it() -> None:
    stream = TextStream(BYTES.decode, ["<end>"])
    shown = [stream.push(byte) for byte in b"a<b <en<end>more"]
    assert "".join(shown) == "a<b <en"
    assert stream.stopped
    assert stream.finish() == ""


def test_the_beginning_of_a_stop_text_is_held_back_and_then_shown() -> None:
    stream = TextStream(BYTES.decode, ["<end>", "\n\n"])
    assert [stream.push(byte) for byte in b"a<en"] == ["a", "", "", ""]
    assert stream.push(ord("x")) == "<enx"
    assert stream.push(ord("\n")) == ""
    assert stream.finish() == "\n"
    assert not stream.stopped


def test_random_texts_and_stops_agree_with_a_plain_search() -> None:
    numbers = random.Random(0)
    for _ in range(500):
        text = "".join(numbers.choices("ab🚀é", k=numbers.randrange(30)))
        stops = ["".join(numbers.choices("ab🚀é", k=numbers.randrange(1, 5))) for _ in range(numbers.randrange(3))]
        ends = []
        for upto in range(len(text) + 1):  # the first place in time at which a stop text is complete
            ends = [text[:upto].find(stop) for stop in stops if stop in text[:upto]]
            if ends:
                break
        stream = TextStream(BYTES.decode, stops)
        assert "".join(pieces(stream, list(text.encode()))) == (text[: min(ends)] if ends else text)
        assert stream.stopped == bool(ends)
