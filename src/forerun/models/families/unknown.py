"""The message for a config.json of a family that forerun does not have.

It names the first component in the order of `COMPONENTS` that no supported family has, and the nearest supported
family. Both are hints for a person. They never make forerun accept a checkpoint: ERNIE 4.5 has only keys that Llama's
reader understands, and its logits through Llama's table are wrong (scripts/family-check measures by how much). Does
not import jax.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import UserError
from forerun.models.families.base import Family
from forerun.models.families.settings import Settings

PAGE = "docs/how-to/new-family.md"
SHOWN_KEYS = 6
SERIES_BONUS = 5  # keys; see `nearest`

Sign = Callable[[Mapping[str, Any]], str | None]  # keys of a config.json -> what shows the component, or None


@dataclass(frozen=True)
class Component:
    """A part of a model, and how a config.json shows it.

    A component is supported as soon as one of the families in `supported_by` is registered.
    """

    name: str
    sign: Sign
    supported_by: tuple[str, ...] = ()

    def is_supported(self, families: Collection[str]) -> bool:
        """Return whether a registered family has this component."""
        return any(name in families for name in self.supported_by)


@dataclass(frozen=True)
class Difference:
    """The keys of a config.json that the reader of a family does not understand."""

    unread: tuple[str, ...]  # they have an effect, but the reader does not know them
    refused: tuple[str, ...]  # "key: value", of keys that the reader knows only with other values
    missing: tuple[str, ...]  # the reader needs them
    fault: str | None = None  # why the reader stopped before its end

    @property
    def count(self) -> int:
        return len(self.unread) + len(self.refused) + len(self.missing) + (self.fault is not None)


def _keys(*keys: str) -> Sign:
    """Return a sign: one of the keys has a value that is not empty, false or 0."""

    def sign(config: Mapping[str, Any]) -> str | None:
        return next((_shown(key, config[key]) for key in keys if config.get(key)), None)

    return sign


def _named(*model_types: str) -> Sign:
    """Return a sign: the model_type is one of these, or starts with one that ends with a star.

    It is for components that no key of config.json shows.
    """

    def sign(config: Mapping[str, Any]) -> str | None:
        kind = str(config.get("model_type"))
        found = any(kind.startswith(one[:-1]) if one.endswith("*") else kind == one for one in model_types)
        return f"model_type: {kind!r}" if found else None

    return sign


def _layers(*types: str) -> Sign:
    """Return a sign: a list of layer types has one of these."""

    def sign(config: Mapping[str, Any]) -> str | None:
        for key in LAYER_LISTS:
            if found := sorted(set(types) & set(_strings(config.get(key)))):
                return f"{key} with {found[0]!r}"
        return None

    return sign


def _rope(*keys: str) -> Sign:
    """Return a sign: the RoPE section, or the section of one layer type in it, has one of these keys."""

    def sign(config: Mapping[str, Any]) -> str | None:
        for section in ("rope_parameters", "rope_scaling"):
            given = config.get(section)
            if not isinstance(given, Mapping):
                continue
            for part in (given, *(value for value in given.values() if isinstance(value, Mapping))):
                if found := _keys(*keys)(part):
                    return f"{section} with {found}"
        return None

    return sign


def _any(*signs: Sign) -> Sign:
    return lambda config: next((found for sign in signs if (found := sign(config))), None)


def _mamba(config: Mapping[str, Any]) -> str | None:
    """Return the sign of Mamba layers. Granite 4.0 has their keys, too, but its dense sizes have only attention."""
    types = {kind for key in LAYER_LISTS for kind in _strings(config.get(key))}
    if types and types <= {"attention", "full_attention", "sliding_attention"}:
        return None
    return _keys("mamba_d_state", "ssm_state_size", "state_size", "hybrid_override_pattern")(config)


def _linear_attention(config: Mapping[str, Any]) -> str | None:
    """Return the sign of linear attention that is not the gated delta rule of Qwen, which has its own component."""
    return None if config.get("linear_num_value_heads") else _layers("linear_attention")(config)


def _activation(config: Mapping[str, Any]) -> str | None:
    """Return the sign of an activation that belongs to an MLP without a gate."""
    kind = config.get("hidden_act")
    return _shown("hidden_act", kind) if kind in ("relu", "relu2", "xielu", "gelu_new") else None


def _encoder(config: Mapping[str, Any]) -> str | None:
    """Return the sign of a model without a causal mask."""
    names = [name for name in _strings(config.get("architectures")) if "MaskedLM" in name or "PreTraining" in name]
    return _shown("architectures", names) if names else _keys("type_vocab_size", "classifier_pooling")(config)


def _wrapper(config: Mapping[str, Any]) -> str | None:
    """Return the sign of a text model inside a multimodal checkpoint."""
    inner = config.get("text_config")
    return f"text_config of {inner.get('model_type')!r}" if isinstance(inner, Mapping) else None


def _quantized(*methods: str) -> Sign:
    """Return a sign: the weights are quantized by one of these methods, or by any if none is given."""

    def sign(config: Mapping[str, Any]) -> str | None:
        given = config.get("quantization_config")
        method = given.get("quant_method") if isinstance(given, Mapping) else given
        return f"quantization_config of {method!r}" if method and (not methods or method in methods) else None

    return sign


LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
QWEN3_5 = ("qwen3_5", "qwen3_5_text")
GEMMA4 = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "enable_moe_block")
MINIMAX = "minimax_m2"
ROUTED = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "gemma4", "gemma4_text", MINIMAX)
SINKS = ("gpt_oss", "granite_swa", "mimo_v2*")
ROUTING = ("scoring_func", "score_function", "n_group", "use_routing_bias", "moe_router_use_sigmoid")
SHARED, GATED_SHARED = ("n_shared_experts", "num_shared_experts"), "shared_expert_intermediate_size"
MULTIPLIERS = ("residual_multiplier", "logits_scaling", "embedding_multiplier", "attention_multiplier")
INTERLEAVED = ("ernie4_5*", "glm", "glm4*", "cohere*", "helium", "llama4_text", "gptj", "codegen", "youtu")
TEXT_SECTIONS = ("text_config", "thinker_config", "llm_config", "language_config", "decoder", "global_config")
CODECS = ("codec_config", "num_codebooks", "num_mel_bins", "audio_encoder", "talker_config")
WITHOUT_GATE = ("arcee", "apertus", "nanochat", "nemotron", "starcoder2", "phi", "gpt_neox", "jais2", "falcon", "opt")
PARALLEL, GATES = ("use_parallel_residual", "parallel_attn"), ("attn_output_gate", "gating")
OTHER_METHODS = ("awq", "bitnet", "bitsandbytes", "gptq", "hqq", "quanto", "torchao")
LAYER_NORM = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layer_norm_elementwise_affine")

# One row per component, from those that change most of the model to those that change one product. The message names
# the first row that applies and is not supported. A new family adds its model_type to the rows that it implements.
COMPONENTS = (
    Component("an encoder and a decoder", _keys("is_encoder_decoder", "encoder_layers", "encoder_config")),
    Component("attention in both directions", _encoder),
    Component("audio codes or spectra", _keys(*CODECS)),
    Component("text diffusion", _any(_keys("canvas_length"), _named("llada", "dream", "diffusion_gemma"))),
    Component("hyper-connections", _keys("hc_mult", "hc_count", "num_hyper_connections")),
    Component("a sparse attention index", _any(_keys("index_topk", "index_n_heads"), _layers("indexed_attention"))),
    Component("Mamba layers", _mamba),
    Component("RG-LRU layers", _keys("lru_width")),
    Component("RWKV layers", _any(_named("rwkv"), _keys("rescale_every"))),
    Component("xLSTM layers", _any(_named("xlstm"), _keys("qk_dim_factor"))),
    Component("recurrent depth", _keys("H_cycles", "num_recurrences")),
    Component("linear attention without the gated delta rule", _linear_attention),
    Component("gated delta rule layers", _keys("linear_num_value_heads"), QWEN3_5),
    Component("latent attention (MLA)", _keys("kv_lora_rank")),
    Component("experts", _any(_keys(*EXPERTS), _layers("sparse", "moe"), _named("dbrx")), ROUTED),
    Component("other routing than softmax", _any(_keys(*ROUTING), _named("llama4_text", MINIMAX)), (MINIMAX,)),
    Component("shared experts", _keys(*SHARED)),
    Component("shared experts with a gate", _keys(GATED_SHARED), ("qwen3_5_moe_text",)),
    Component("experts beside a dense MLP", _keys("enable_moe_block"), ("gemma4", "gemma4_text")),
    Component("AltUp and LAuReL", _keys("altup_num_inputs", "laurel_rank")),
    Component("attention sinks", _any(_keys("attention_sinks"), _named(*SINKS)), ("gpt_oss",)),
    Component("chunked attention", _any(_keys("attention_chunk_size"), _layers("chunked_attention"))),
    Component("cross attention layers", _keys("cross_attention_layers", "add_cross_attention")),
    Component("short convolution layers", _any(_keys("conv_L_cache"), _layers("conv")), ("lfm2",)),
    Component("differential attention", _any(_keys("lambda_std_dev"), _named("diffllama"))),
    Component("ALiBi positions", _any(_keys("alibi"), _named("bloom", "mpt"))),
    Component("an MLP without a gate", _any(_activation, _named(*WITHOUT_GATE))),
    Component("attention and MLP in parallel", _any(_keys(*PARALLEL), _named("cohere*", "phi", "gptj", "codegen"))),
    Component("LayerNorm in a decoder with RoPE", _any(_keys(*LAYER_NORM), _named("olmo", "nemotron"))),
    Component("norms inside attention and MLP", _named("bitnet")),
    Component("embeddings per layer", _keys("hidden_size_per_layer_input"), GEMMA4),
    Component("keys and values shared between layers", _keys("num_kv_shared_layers", "kv_source_layers"), GEMMA4),
    Component("head dimensions per layer", _keys("global_head_dim", "per_layer_config"), GEMMA4),
    Component("a gate on the attention output", _any(_keys(*GATES), _named("muse_glimmer*")), QWEN3_5),
    Component("norms of q and k after RoPE", _named("hunyuan_v1*")),
    Component("interleaved RoPE", _any(_keys("rope_interleave"), _named(*INTERLEAVED)), ("ernie4_5", "glm4", "glm")),
    Component("a query temperature by position", _rope("llama_4_scaling_beta"), ("ministral3",)),
    Component("YaRN with mscale", _rope("mscale", "mscale_all_dim"), ("ministral3",)),
    Component("multimodal RoPE", _rope("mrope_section"), QWEN3_5),
    Component("multipliers of the residual stream and the logits", _keys(*MULTIPLIERS), ("granite",)),
    Component("a scale of the logits", _keys("logit_scale", "output_multiplier", "scale_depth"), ("granite",)),
    Component("a text model inside a multimodal checkpoint of this kind", _wrapper),
    Component("FP8 weights", _quantized("fp8"), ("ministral3",)),
    Component("MXFP4 weights", _quantized("mxfp4"), ("gpt_oss",)),
    Component("quantized weights", _quantized(*OTHER_METHODS)),
)  # fmt: skip
# Keys of the outer section that describe the complete model. All others there belong to towers and tokens.
OUTER_KEYS = ("is_encoder_decoder", "encoder_config", "quantization_config", "canvas_length", "architectures", *CODECS)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of the text model, or `config` if the file describes only a text model."""
    for key in TEXT_SECTIONS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return text_config(inner)
    return config


def first_unsupported(config: Mapping[str, Any], families: Collection[str]) -> str | None:
    """Return the first component that no registered family has, with its sign, or None if config.json shows none."""
    text = text_config(config)
    described = dict(text)
    if text is not config:
        described |= {key: config[key] for key in OUTER_KEYS if key in config} | {"text_config": text}
    for one in COMPONENTS:
        if (found := one.sign(described)) and not one.is_supported(families):
            return f"{one.name} ({found})"
    return None


class Probe(Settings):
    """Settings that record what a reader does not understand, instead of an error at the first such key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, "config.json")
        self.refused_values: list[str] = []
        self.missing: list[str] = []

    def _checked(self, key: str, value: Any) -> Any:
        return value

    def need(self, key: str, kind: type = int) -> Any:
        value = self.take(key)
        if isinstance(value, kind):
            return value
        self.missing.append(key)
        return kind(1)

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        value = self.take(key, default)
        if value in allowed:
            return value
        self.refused_values.append(_shown(key, value))
        return allowed[0]


def difference(config: Mapping[str, Any], family: Family, without_effect: Collection[str] = ()) -> Difference:
    """Return the keys of a config.json that the reader of `family` does not understand.

    Args:
        config: The content of the file, or the section of its text model.
        family: The family whose reader is tried. The model_type is not compared.
        without_effect: Further keys that have no effect in this family.
    """
    probe, fault = Probe(config), None
    try:
        family.read(probe)
    except UserError as error:
        fault = error.what
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        fault = f"{type(error).__name__}: {str(error)[:200]}"
    return Difference(tuple(probe.unread(*without_effect)), tuple(probe.refused_values), tuple(probe.missing), fault)


def nearest(config: Mapping[str, Any], families: Mapping[str, Family]) -> tuple[Family, Difference]:
    """Return the nearest family and its difference.

    The measure is the number of keys that the family's reader does not understand: unread keys, refused values, missing
    keys, and 1 if it stops early. It is 5 less if both names start with the same word (qwen3_moe and qwen3), because
    models of one series share most layers. Of equal families, the one with the longest common start of the name wins.
    """
    text = text_config(config)
    kind = str(text.get("model_type"))
    found = {name: difference(text, family) for name, family in families.items()}

    def distance(name: str) -> tuple[int, int]:
        bonus = SERIES_BONUS if _series(name) == _series(kind) else 0
        common = next((n for n, pair in enumerate(zip(name, kind, strict=False)) if pair[0] != pair[1]), len(name))
        return found[name].count - bonus, -common

    name = kind if kind in families else min(families, key=distance)
    return families[name], found[name]


def _series(model_type: str) -> str:
    """Return the letters at the start of a model type."""
    found = re.match("[a-z]*", model_type)
    return found[0] if found else ""


def unknown_family(config: Mapping[str, Any], where: str, families: Mapping[str, Family]) -> UserError:
    """Return the error for a config.json whose model_type is not one of `families`.

    Args:
        config: The content of the file.
        where: The name of the file, for the message.
        families: The registered families.
    """
    kind = config.get("model_type")
    hints = _hints(config, families) if isinstance(kind, str) else []
    return UserError(
        "E-MODEL-001",
        f"{where}: forerun has no model family {kind!r}",
        why="\n".join([*hints, f"the families are {', '.join(families)}"]),
        fix=f"choose a model of these families, or add one: {PAGE}",
    )


def _hints(config: Mapping[str, Any], families: Mapping[str, Family]) -> list[str]:
    """Return a line about the first unsupported component, and one about the nearest family."""
    family, left = nearest(config, families)
    keys = [*left.unread, *left.refused, *(f"{key} (missing)" for key in left.missing)]
    more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    component = first_unsupported(config, families)
    if component is not None:
        first = f"the first component that forerun does not support is {component}"
    elif keys:
        first = "every component that config.json shows is supported in other families, but their combination is not"
    else:
        first = "config.json shows no unsupported component, but equal keys do not mean equal computations"
    unread = f"its reader does not understand {', '.join(keys[:SHOWN_KEYS])}{more}" if keys else "it reads every key"
    return [first, f"the nearest supported family is {family.model_type}: {unread}"]


def _strings(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _shown(key: str, value: Any) -> str:
    return key if isinstance(value, dict | list) else f"{key}: {reprlib.repr(value)}"
