"""The tensors of a GGUF file: llama.cpp's names, and the values from a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.hub.safetensors import Weights
from forerun.models.decoder_config import DecoderConfig
from forerun.models.families.base import Config, Family
from forerun.weights_io.gguf.architecture import Architecture, Metadata
from forerun.weights_io.match import Match, Stacked, matches
from forerun.weights_io.packed import Unpacked
from forerun.weights_io.scales import SUFFIX

Floats = NDArray[np.float32]
STEP_BLOCK = 32  # weights of a block of Q4_0 and Q8_0
HEAD = "output.weight"
EMBEDDING = "token_embd.weight"
MODEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
# One name of Hugging Face for two places: before the MLP (Llama), or after the attention (Gemma, OLMo 2).
AFTER_ATTENTION = "post_attention_layernorm"
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: its name and shape, and the tensor of the folder that has its values."""

    name: str
    shape: tuple[int, ...]
    match: Match | None  # None for factors of RoPE
    values: tuple[float, ...] = ()


class TensorSource:
    """The tensors of a GGUF file, computed one at a time from the weights of a Hugging Face folder."""

    def __init__(self, weights: Weights, family: Family, model: Stacked, config: Config, metadata: Metadata) -> None:
        self._weights, self._config, self._architecture = weights, config, metadata.architecture
        found = matches(weights, family.table, model)
        if (layout := family.layout) is not None:  # llama.cpp's names are those of the text model
            found = [replace(one, entry=replace(one.entry, name=layout.plain(one.entry.name))) for one in found]
        self.tensors = list(_factors(metadata)) + list(_named(found, self._architecture, config))

    def value(self, tensor: GgufTensor) -> Floats:
        """Return the values of a tensor in float32, in the layout of llama.cpp."""
        if tensor.match is None:
            return np.asarray(tensor.values, np.float32)
        value: NDArray[Any] = np.array(self._weights.view(tensor.match.name)).astype(np.float32)
        self._weights.release(tensor.match.name)
        return np.ascontiguousarray(_changed(value, tensor.match.entry.name, self._architecture, self._config))

    def is_integer(self, tensor: GgufTensor) -> bool:
        """Return whether the folder stores a matrix as integers."""
        weights, match = self._weights, tensor.match
        return match is not None and isinstance(weights, Unpacked) and weights.is_unpacked(match.name)

    def steps(self, tensor: GgufTensor) -> Floats | None:
        """Return the scale of each block of 32 weights of a matrix that was trained as integers, [rows, blocks].

        The result is None for other tensors, and if a block would have weights of several groups.
        """
        weights, match = self._weights, tensor.match
        if match is None or not isinstance(weights, Unpacked) or not weights.is_unpacked(match.name):
            return None
        scale = weights.scales.view(f"{match.name.removesuffix('.weight')}{SUFFIX}").astype(np.float32)
        group = tensor.shape[1] // scale.shape[1]
        if group % STEP_BLOCK or scale.shape[0] != tensor.shape[0]:
            return None
        scale = _changed(scale, match.entry.name, self._architecture, self._config)
        return np.repeat(scale, group // STEP_BLOCK, axis=1)


def gguf_name(name: str, architecture: Architecture) -> str:
    """Return llama.cpp's name of a tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.{kind}"
    found = _LAYER.fullmatch(stem)
    if found is None:
        raise ValueError(f"no GGUF name is known for {name}")
    layer, inner = found.groups()
    if inner == AFTER_ATTENTION:
        after = architecture.name in ("gemma2", "gemma3", "olmo2")
        return f"blk.{layer}.{'post_attention_norm' if after else 'ffn_norm'}.{kind}"
    return f"blk.{layer}.{LAYER_NAMES[inner]}.{kind}"


def interleaved(value: Floats, heads: int) -> Floats:
    """Return the rows of q or k in the order of llama.cpp: the two dimensions of each rotated pair are neighbours.

    Hugging Face has the first dimensions of all pairs of a head, then the second ones.
    """
    rows = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return rows.swapaxes(1, 2).reshape(value.shape)


def _changed(value: Floats, name: str, architecture: Architecture, config: Config) -> Floats:
    if architecture.interleaved and re.search(r"\.[qk]_proj\.(weight|bias)$", name):
        return interleaved(value, config.heads if ".q_proj." in name else config.kv_heads)
    if isinstance(config, DecoderConfig):
        return value + np.float32(1) if config.norm_around_one and name.endswith("norm.weight") else value
    transposed = re.search(r"\.c_(attn|proj|fc)\.weight$", name)  # GPT-2 has the inputs first
    return value.T if transposed else value


def _named(found: list[Match], architecture: Architecture, config: Config) -> Iterator[GgufTensor]:
    for match in found:
        name, shape = gguf_name(match.entry.name, architecture), match.entry.shape
        if re.search(r"\.c_(attn|proj|fc)\.weight$", match.entry.name):
            shape = shape[::-1]
        yield GgufTensor(name, shape, match)
        if name == EMBEDDING and config.tied and architecture.name == "olmo2":
            yield GgufTensor(HEAD, shape, match)  # llama.cpp does not tie the embeddings of OLMo 2


def _factors(metadata: Metadata) -> Iterator[GgufTensor]:
    for name, values in metadata.tensors.items():
        yield GgufTensor(name, (len(values),), None, values)
