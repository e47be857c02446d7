"""A Qwen3 of two layers as transformers writes it, and a tokenizer of bytes: what the tests of methods begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 264


def write_tokenizer(folder: Path, *extra: str, template: str | None = None) -> None:
    """A token for every byte, `<|end|>`, which ends a text, and the extra ones."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>", *extra])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)


def tiny_model(width: int, head_dim: int, seed: int = 0, **more: Any) -> Any:
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
        **more,
    )
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(config)
