"""tokenizer.json, built with the `tokenizers` library from the vocabularies that weight files carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIRST_BYTE, BYTES = 3, 256
SPECIAL = ("<unk>", "<s>", "</s>")
SPACE = "▁"


def byte_level(tokens: Sequence[str], merges: Sequence[tuple[str, str]], special: Sequence[str]) -> Tokenizer:
    """GPT-2's byte-level BPE with each digit a token of its own: what GGUF calls `smollm`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def sentencepiece(texts: Sequence[str], scores: Sequence[float]) -> Tokenizer:
    """SentencePiece's BPE with byte fallback, Llama 2's: a space in front of the text, <s> before everything."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    ordinary = FIRST_BYTE + BYTES
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(BYTES))]
    tokens += [text.replace(" ", SPACE) for text in texts[ordinary:]]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = merges_by_score(tokens[ordinary:], scores[ordinary:], vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=SPECIAL[0], fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: so every way to split a piece, best piece first."""
    best_first = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = []
    for token in (tokens[i] for i in best_first):
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in halves if left in vocab and right in vocab]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges
