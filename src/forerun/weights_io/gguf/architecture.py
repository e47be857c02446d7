"""The architectures of llama.cpp: which family has one, its metadata, and its names and layouts of tensors.

llama.cpp computes some settings from constants of an architecture instead of the file. `architecture_of` rejects a
model whose settings differ from these constants, because llama.cpp would load it and compute other logits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.config.schema import RopeScaling
from forerun.errors import UserError
from forerun.hub.safetensors import Weights
from forerun.models.decoder_config import DecoderConfig, Gpt2Config
from forerun.models.families.base import Config, Family
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Linear, LongRope, Rope, Yarn, frequencies
from forerun.weights_io.match import Match, Stacked, matches
from forerun.weights_io.packed import Unpacked
from forerun.weights_io.scales import SUFFIX

LOCAL_THETA = 10_000.0  # the base frequency of Gemma 3's local layers, unless the file has one


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    `interleaved` means that RoPE rotates neighbouring dimensions, so that the rows of q and k need another order.
    `square` means that all heads together must be as wide as the model.
    """

    name: str
    interleaved: bool = False
    square: bool = False
    biases: bool = False  # llama.cpp reads biases of the attention output and of the MLP


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True, biases=True),
    "mistral": Architecture("llama", interleaved=True, biases=True),
    "smollm3": Architecture("smollm3", interleaved=True),
    "qwen2": Architecture("qwen2", square=True),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture("gemma2"),
    "gemma3_text": Architecture("gemma3"),
    "phi3": Architecture("phi3", square=True),
    "olmo2": Architecture("olmo2", square=True),
    "gpt2": Architecture("gpt2", square=True, biases=True),
}
# The layers of one period that see all positions: the last one.
WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6}
WIDE_SCALE_LAYERS = {"gemma2": 46, "gemma3": 62}  # the 27B models scale queries by embed / heads
NO_ROPE_STEP = 4  # SmolLM3: every fourth layer has no RoPE


@dataclass(frozen=True)
class Metadata:
    """The metadata of a model, without the vocabulary.

    `keys` are complete names with values. `tensors` are the factors of RoPE. `notes` are differences that the user must
    know.
    """

    architecture: Architecture
    keys: dict[str, Any]
    tensors: dict[str, tuple[float, ...]]
    notes: tuple[str, ...]


def architecture_of(family: Family, config: Config) -> Architecture:
    """Return the architecture that computes the same logits.

    Raises:
        UserError: llama.cpp has no such architecture, or it ignores a setting of the model.
    """
    found = ARCHITECTURES.get(family.model_type)
    faults = ["forerun has not compared this family with llama.cpp"] if found is None else list(_faults(found, config))
    if found is None or faults:
        raise UserError(
            "E-WEIGHTS-021",
            f"a {family.model_type} model with these settings has no GGUF form",
            why="; ".join(faults),
            fix=f"export without --gguf; families with a GGUF form: {', '.join(ARCHITECTURES)}",
        )
    return found


def metadata_of(
    family: Family, config: Config, content: Mapping[str, Any], default_context: int | None = None
) -> Metadata:
    """Return the metadata of a model.

    Args:
        family: The family.
        config: The dimensions of the model.
        content: The config.json, which has the length of the context.
        default_context: The length of the context if config.json has none, in tokens.
    """
    found = architecture_of(family, config)
    context = content.get("max_position_embeddings") or default_context or 2048
    notes: list[str] = []
    keys: dict[str, Any] = {
        "block_count": config.layers,
        "embedding_length": config.embed,
        "feed_forward_length": config.mlp,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "vocab_size": config.vocab,
    }
    tensors: dict[str, tuple[float, ...]] = {}
    if isinstance(config, Gpt2Config):
        keys |= {"context_length": config.positions, "attention.layer_norm_epsilon": config.norm_eps}
    else:
        window = min((kind.window for kind in config.layer_kinds if kind.window is not None), default=None)
        if window is not None and found.name not in WINDOW_PERIODS and window < context:
            notes.append(
                f"llama.cpp ignores the sliding window of {window} tokens, so the file limits the context to {window}"
            )
            context = window
        keys |= {"context_length": context, **_decoder_keys(found, config, window)}
        keys |= _rope_keys(_far(config), context)
        tensors = _rope_tensors(_far(config))
        if isinstance(_far(config).scaling, LongRope):
            notes.append("llama.cpp chooses LongRoPE's factors by the size of its context, not by the text's length")
    named = {f"{found.name}.{key}": value for key, value in keys.items()}
    return Metadata(found, {"general.architecture": found.name, **named}, tensors, tuple(notes))


def _decoder_keys(found: Architecture, config: DecoderConfig, window: int | None) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rope_dims or config.head_dim,
        "rope.freq_base": _far(config).theta,
    }
    if found.name in WINDOW_PERIODS and window is not None:
        keys["attention.sliding_window"] = window
    if found.name == "phi3":
        keys["attention.sliding_window"] = 0  # llama.cpp ignores other values, with a warning
    near = next((kind.rope for kind in config.layer_kinds if kind.window is not None), None)
    if found.name == "gemma3" and near is not None:
        keys["rope.freq_base_swa"] = near.theta
    if config.attention_softcap is not None:
        keys["attn_logit_softcapping"] = config.attention_softcap
    if config.logit_softcap is not None:
        keys["final_logit_softcapping"] = config.logit_softcap
    return keys


def _rope_keys(rope: Rope, context: int) -> dict[str, Any]:
    match rope.scaling:
        case Linear(factor):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case Yarn() as scaling:
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": scaling.factor,
                "rope.scaling.original_context_length": scaling.original,
                "rope.scaling.yarn_beta_fast": scaling.fast,
                "rope.scaling.yarn_beta_slow": scaling.slow,
            }
        case LongRope() as scaling:
            return {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": scaling.original,
                "rope.scaling.attn_factor": scaling.attention,
            }
    return {}


def _rope_tensors(rope: Rope) -> dict[str, tuple[float, ...]]:
    """Return the divisors of the frequencies, for the scalings that have one for each pair of dimensions."""
    match rope.scaling:
        case RopeScaling():
            plain = frequencies(Rope(rope.theta, rope.dims))
            return {"rope_freqs.weight": tuple((plain / frequencies(rope)).tolist())}
        case LongRope(short, long):
            return {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    return {}


def _far(config: DecoderConfig) -> Rope:
    """Return the RoPE of the layers that see all positions, or of all layers if none does."""
    kinds = [kind for kind in config.layer_kinds if kind.rope is not None]
    rope = next((kind.rope for kind in kinds if kind.window is None), kinds[0].rope)
    assert rope is not None
    return rope


def _faults(found: Architecture, config: Config) -> Iterator[str]:
    """Yield the settings that llama.cpp would ignore or change."""
    if found.square and config.heads * config.head_dim != config.embed:
        yield f"{config.heads} heads of {config.head_dim} must be as wide as the model, {config.embed}"
    if isinstance(config, Gpt2Config):
        return
    if (config.out_bias or config.mlp_bias) and not found.biases:
        yield "it has biases of the attention output or of the MLP"
    yield from _kind_faults(found, config)
    yield from _rope_faults(found, config)
    if found.name in WIDE_SCALE_LAYERS:
        width = config.embed // config.heads if config.layers == WIDE_SCALE_LAYERS[found.name] else config.head_dim
        if not math.isclose(config.query_scale or 0.0, width**-0.5, rel_tol=1e-6):
            yield f"query_pre_attn_scalar must be {width}"
    if found.name == "gemma2" and (config.attention_softcap is None or config.logit_softcap is None):
        yield "it has no soft caps"
    if found.name == "gemma3" and config.attention_softcap is not None:
        yield "it has a soft cap of the attention"


def _kind_faults(found: Architecture, config: DecoderConfig) -> Iterator[str]:
    kinds = [config.layer_kinds[n % len(config.layer_kinds)] for n in range(config.layers)]
    if found.name in WINDOW_PERIODS:
        period = WINDOW_PERIODS[found.name]
        if [kind.window is None for kind in kinds] != [n % period == period - 1 for n in range(config.layers)]:
            yield f"every layer must have a sliding window, except every {period}th"
        return
    turning = [kind.rope is not None for kind in kinds]
    wanted = [found.name != "smollm3" or (n + 1) % NO_ROPE_STEP != 0 for n in range(config.layers)]
    if turning != wanted:
        yield f"exactly every {NO_ROPE_STEP}th layer of SmolLM3, and no layer of other models, must be without RoPE"


def _rope_faults(found: Architecture, config: DecoderConfig) -> Iterator[str]:
    ropes = {kind.rope for kind in config.layer_kinds if kind.rope is not None}
    near = {kind.rope for kind in config.layer_kinds if _is_local(found, kind) and kind.rope is not None}
    if len(ropes - near) > 1:
        yield "its layers have different RoPE settings"
    if any(rope.scaling is not None for rope in near):
        yield "RoPE of its local layers is scaled"
    match _far(config).scaling:
        case RopeScaling() if found.name != "llama":
            yield "it has Llama 3's RoPE scaling"
        case LongRope() if found.name != "phi3":
            yield "it has LongRoPE scaling"
        case Yarn() as scaling:
            if not math.isclose(scaling.attention, 1 + 0.1 * math.log(scaling.factor), rel_tol=1e-6):
                yield f"YaRN's attention factor is {scaling.attention:g}"
            if not scaling.truncate:
                yield "YaRN's ramp does not end at integer pairs"


def _is_local(found: Architecture, kind: LayerKind) -> bool:
    return found.name == "gemma3" and kind.window is not None


# ---- The tensors of a GGUF file: llama.cpp's names, and the values from a Hugging Face folder ----


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
