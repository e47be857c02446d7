"""A reader of llama2.c's files: the checkpoint of version 0 and the vocabulary of its tokenizer.bin."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
HEADER = struct.Struct("<7i")


@dataclass(frozen=True)
class Sizes:
    embed: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads


@dataclass(frozen=True)
class Piece:
    """One piece of the vocabulary, with the spaces that llama2.c writes where SentencePiece has ▁."""

    text: str
    score: float


def sizes(data: bytes) -> Sizes:
    """The header. A negative vocabulary says that the head has weights of its own."""
    embed, mlp, layers, heads, kv_heads, vocab, context = HEADER.unpack_from(data)
    return Sizes(embed, mlp, layers, heads, kv_heads, abs(vocab), context, tied=vocab > 0)


def weights(data: bytes) -> tuple[dict[str, Floats], int]:
    """Every tensor, the layers stacked, and where the checkpoint ends. Two tables of RoPE factors are passed over."""
    s = sizes(data)
    kv = s.kv_heads * s.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (s.vocab, s.embed),
        "attention_norm": (s.layers, s.embed),
        "wq": (s.layers, s.embed, s.embed),
        "wk": (s.layers, kv, s.embed),
        "wv": (s.layers, kv, s.embed),
        "wo": (s.layers, s.embed, s.embed),
        "mlp_norm": (s.layers, s.embed),
        "w1": (s.layers, s.mlp, s.embed),
        "w2": (s.layers, s.embed, s.mlp),
        "w3": (s.layers, s.mlp, s.embed),
        "final_norm": (s.embed,),
        "rope": (2, s.context, s.head_dim // 2),
    }
    if not s.tied:
        shapes["head"] = (s.vocab, s.embed)
    tensors, offset = {}, HEADER.size
    for name, shape in shapes.items():
        tensors[name] = np.frombuffer(data, "<f4", int(np.prod(shape)), offset).reshape(shape)
        offset += tensors[name].nbytes
    del tensors["rope"]
    return tensors, offset


def pieces(data: bytes, offset: int, vocab: int) -> list[Piece]:
    """The vocabulary that starts at `offset` and ends with the data."""
    found = []
    offset += 4  # the longest piece's length
    for _ in range(vocab):
        score, length = struct.unpack_from("<fi", data, offset)
        offset += 8
        found.append(Piece(data[offset : offset + length].decode(), score))
        offset += length
    if offset != len(data):
        raise ValueError(f"{len(data) - offset} bytes are left after {vocab} pieces")
    return found
