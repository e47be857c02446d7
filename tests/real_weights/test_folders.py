"""The converted folders are the real models: transformers loads them, and they speak."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from real_weights import llama2c

STORY = (
    "Once upon a time there was a small dog named Max. Max liked to run in the park with his friend Tom. "
    "One day it began to rain, and they ran home. They were wet, but they were happy."
)
TEXTS = [
    "Once upon a time",
    "  two spaces, then three   and a tab\there\n\nand lines\n",
    "In 1987 it cost $3.50, don't you think?",
    "Grüße aus Köln, Łódź und 東京 🙂",
    "def f(x):\n    return x ** 2\n",
]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever the machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loaded(folder: Path) -> tuple[Any, Any]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def continued(model: Any, inputs: Any, tokens: int) -> list[int]:
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def loss_per_token(model: Any, tokenizer: Any, text: str) -> float:
    import torch

    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


@pytest.mark.torch
@pytest.mark.usefixtures("one_thread")
def test_smollm2_answers(smollm2_folder: Path) -> None:
    model, tokenizer = loaded(smollm2_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = tokenizer.decode(continued(model, inputs, 16))
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert loss_per_token(model, tokenizer, STORY) < 2.7


@pytest.mark.torch
@pytest.mark.usefixtures("one_thread")
def test_stories_tells_one(stories_folder: Path) -> None:
    model, tokenizer = loaded(stories_folder)
    story = tokenizer.decode(continued(model, tokenizer("Once upon a time", return_tensors="pt"), 48))
    assert story == (
        ", there was a little girl named Lily. She loved to play outside in the sunshine. "
        "One day, she saw a big, red ball in the sky. It was the sun! She thought it was so pretty.\n"
    )
    assert loss_per_token(model, tokenizer, STORY) < 1.6


@pytest.mark.torch
@pytest.mark.usefixtures("one_thread")
def test_stories_logits_are_those_of_llama2c(stories_folder: Path, stories_file: Path) -> None:
    import torch

    model, tokenizer = loaded(stories_folder)
    ids = tokenizer(STORY)["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits, llama2c_logits(stories_file.read_bytes(), ids), atol=2e-4)


def llama2c_logits(data: bytes, ids: list[int]) -> NDArray[np.float32]:
    """run.c's forward pass over a whole text, on the checkpoint as it lies in the file: RoPE turns neighbours."""
    s = llama2c.sizes(data)
    w, _ = llama2c.weights(data)
    frequencies = 10000.0 ** (-np.arange(0, s.head_dim, 2) / s.head_dim)
    turn = np.exp(1j * np.outer(np.arange(len(ids)), frequencies)).astype(np.complex64)[:, None, :]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1)

    def norm(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
        return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-5))

    def heads(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return x.reshape(len(ids), s.heads, s.head_dim)

    def turned(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return (np.ascontiguousarray(heads(x)).view(np.complex64) * turn).view(np.float32)

    x = w["embedding"][ids]
    for i in range(s.layers):
        h = norm(x, w["attention_norm"][i])
        q, k, v = turned(h @ w["wq"][i].T), turned(h @ w["wk"][i].T), heads(h @ w["wv"][i].T)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(s.head_dim)) + future
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", scores, v).reshape(len(ids), -1) @ w["wo"][i].T
        h = norm(x, w["mlp_norm"][i])
        gate = h @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["final_norm"]) @ w["embedding"].T


def sentencepiece_ids(pieces: list[llama2c.Piece], text: str) -> list[int]:
    """SentencePiece's BPE as its definition has it: join the neighbours whose union scores best, until none does."""
    ids = {piece.text: i for i, piece in enumerate(pieces) if i >= 259}
    parts = [ids.get(letter, letter) for letter in f" {text}"]
    parts = [p for part in parts for p in ([part] if isinstance(part, int) else [3 + b for b in part.encode()])]
    while True:
        unions = [ids.get(pieces[a].text + pieces[b].text) for a, b in pairwise(parts)]
        unions = [u if min(parts[i : i + 2]) >= 259 else None for i, u in enumerate(unions)]
        scores = [-np.inf if union is None else pieces[union].score for union in unions]
        if not scores or max(scores) == -np.inf:
            return [1, *parts]
        best = scores.index(max(scores))
        parts[best : best + 2] = [unions[best]]


@pytest.mark.parametrize("text", [*TEXTS, STORY])
def test_stories_tokens_are_those_of_sentencepiece(text: str, stories_folder: Path, stories_file: Path) -> None:
    from tokenizers import Tokenizer

    data = stories_file.read_bytes()
    tokenizer = Tokenizer.from_file(str(stories_folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert ids == sentencepiece_ids(llama2c.pieces(data, llama2c.weights(data)[1], llama2c.sizes(data).vocab), text)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_tokens_are_the_text(text: str, smollm2_folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    assert [token for token in encoded.tokens if sum(letter.isdigit() for letter in token) > 1] == []


def test_smollm2_special_tokens_are_whole(smollm2_folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n")
    assert encoded.tokens == ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>", "Ċ"]
    assert [encoded.ids[0], encoded.ids[4]] == [1, 2]


def test_configs_are_the_published_ones(smollm2_folder: Path, stories_folder: Path) -> None:
    smollm2 = json.loads((smollm2_folder / "config.json").read_text())
    stories = json.loads((stories_folder / "config.json").read_text())
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    assert [smollm2[key] for key in keys] == [576, 1536, 30, 9, 3]
    assert [smollm2[key] for key in more] == [49152, 8192, 1e-5, 100000.0, True]
    assert [stories[key] for key in keys] == [288, 768, 6, 6, 6]
    assert [stories[key] for key in more] == [32000, 256, 1e-5, 10000.0, True]
