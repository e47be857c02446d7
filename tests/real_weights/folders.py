"""Real models as Hugging Face folders: fetched, converted and kept; what `forerun` and transformers then read."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from real_weights import gguf_file, llama2c, tokenizer_json
from real_weights.cache import made_once
from real_weights.registry import SMOLLM2, STORIES

Floats = NDArray[np.float32]
ORDINARY = 1  # GGUF's type of a token that is not special


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, in float32: the values of its Q4_1 weights. Apache-2.0."""
    return made_once(f"smollm2-135m-instruct-{edition()}", write_smollm2)


def stories_folder() -> Path:
    """stories15M, a Llama trained on TinyStories, with Llama 2's vocabulary. MIT."""
    return made_once(f"stories15m-{edition()}", write_stories)


def edition() -> str:
    """A change of the code that writes the folders makes new folders."""
    sources = (__file__, gguf_file.__file__, llama2c.__file__, tokenizer_json.__file__)
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:8]


def write_smollm2(folder: Path) -> None:
    source = gguf_file.opened(SMOLLM2.file())
    facts = source.metadata
    heads, kv_heads = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    tensors = {"model.embed_tokens.weight": source.read("token_embd.weight")}
    tensors["model.norm.weight"] = source.read("output_norm.weight")
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(facts["llama.block_count"]):
        for ours, theirs in names.items():
            tensors[f"model.layers.{layer}.{ours}.weight"] = source.read(f"blk.{layer}.{theirs}.weight")
        for name, count in (("q", heads), ("k", kv_heads)):
            key = f"model.layers.{layer}.self_attn.{name}_proj.weight"
            tensors[key] = half_split(tensors[key], count)

    tokens = facts["tokenizer.ggml.tokens"]
    bos, eos, pad = (facts[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding"))
    config = llama_config(
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=len(tokens),
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=decimal(facts["llama.attention.layer_norm_rms_epsilon"]),
        rope_theta=decimal(facts["llama.rope.freq_base"]),
        tie_word_embeddings="output.weight" not in source.tensors,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    special = [
        token for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind != ORDINARY
    ]
    merges = [(left, right) for left, right in (pair.split(" ") for pair in facts["tokenizer.ggml.merges"])]
    words = {
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "pad_token": tokens[pad],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "chat_template": facts["tokenizer.chat_template"],
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    write_folder(folder, tensors, config, generation, tokenizer_json.byte_level(tokens, merges, special), words)


def write_stories(folder: Path) -> None:
    data = STORIES.file().read_bytes()
    sizes = llama2c.sizes(data)
    stacked, end = llama2c.weights(data)
    pieces = llama2c.pieces(data, end, sizes.vocab)
    tensors = {"model.embed_tokens.weight": stacked["embedding"], "model.norm.weight": stacked["final_norm"]}
    if not sizes.tied:
        tensors["lm_head.weight"] = stacked["head"]
    names = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "wq",
        "self_attn.k_proj": "wk",
        "self_attn.v_proj": "wv",
        "self_attn.o_proj": "wo",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "w1",
        "mlp.up_proj": "w3",
        "mlp.down_proj": "w2",
    }
    interleaved = {"wq": sizes.heads, "wk": sizes.kv_heads}
    for layer in range(sizes.layers):
        for ours, theirs in names.items():
            weight = stacked[theirs][layer]
            weight = half_split(weight, interleaved[theirs]) if theirs in interleaved else weight
            tensors[f"model.layers.{layer}.{ours}.weight"] = weight

    unk, bos, eos = tokenizer_json.SPECIAL
    config = llama_config(
        hidden_size=sizes.embed,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.context,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=sizes.tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    tokenizer = tokenizer_json.sentencepiece([piece.text for piece in pieces], [piece.score for piece in pieces])
    words = {"bos_token": bos, "eos_token": eos, "unk_token": unk}
    # It was trained on stories with <s> between them and no </s>: llama2.c, too, stops where a new story would begin.
    generation = {"bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": 0}
    write_folder(folder, tensors, config, generation, tokenizer, words)


def half_split(weight: Floats, heads: int) -> Floats:
    """Rows of q or k for RoPE over neighbours (0, 1), (2, 3), ... reordered for RoPE over the halves of a head."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def decimal(value: float) -> float:
    """1e-05, where a float32 read as a Python float is 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def llama_config(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "use_cache": True,
        **sizes,
    }


def write_folder(
    folder: Path,
    tensors: dict[str, Floats],
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: Any,
    words: dict[str, str],
) -> None:
    write_safetensors(folder / "model.safetensors", tensors)
    tokenizer.save(str(folder / "tokenizer.json"))
    about_text = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **words,
    }
    contents = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": about_text,
        "special_tokens_map.json": {name: token for name, token in words.items() if name.endswith("_token")},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: dict[str, Floats]) -> None:
    """The format by hand, so that these folders need no package that forerun itself does not need."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        head[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, "<f4").data)
