"""The supported families: selection by config.json, and selection by dimensions for an export."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from forerun.config.schema import RopeScaling
from forerun.errors import UserError
from forerun.models.decoder_config import DecoderConfig, Gpt2Config
from forerun.models.families import experts, gemma, gpt2, llama, recurrent
from forerun.models.families.base import Config, Family
from forerun.models.families.settings import Settings
from forerun.models.families.unknown import Difference, difference, unknown_family
from forerun.models.families.wrapper import TEXT, layout_in, text_config, wrapper_of
from forerun.nn.rope import LongRope

FAMILIES = {
    family.model_type: family
    for family in (
        llama.LLAMA,
        llama.QWEN2,
        llama.QWEN3,
        llama.MISTRAL,
        llama.SMOLLM3,
        gemma.GEMMA2,
        gemma.GEMMA3,
        gemma.VAULT,
        gemma.GEMMA4,
        gemma.GEMMA4_UNIFIED,
        llama.PHI3,
        llama.OLMO2,
        llama.OLMO3,
        llama.EXAONE,
        llama.SEED_OSS,
        llama.CWM,
        llama.MINISTRAL3,
        llama.GRANITE,
        llama.GRANITE_HYBRID,
        llama.GLM,
        llama.GLM4,
        llama.ERNIE,
        recurrent.QWEN3_5,
        recurrent.QWEN3_5_MOE,
        recurrent.LFM2,
        experts.QWEN3_MOE,
        experts.MIXTRAL,
        experts.OLMOE,
        experts.MINIMAX_M2,
        experts.GPT_OSS,
        gpt2.FAMILY,
    )
}


CUSTOM_MODEL = "forerun_custom"  # the model_type of an exported custom class, which is not a family


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config.json. `where` names the file in an error."""
    kind = config.get("model_type")
    if kind == CUSTOM_MODEL:
        raise UserError(
            "E-MODEL-030",
            f"{where} is the export of a custom model class: a job cannot start from it",
            why="forerun does not import the code in an export, so a job has to name the class itself",
            fix="set model to the class as module.path:Class, or resume the run that was exported",
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise unknown_family(config, where, FAMILIES)
    return FAMILIES[kind]


def read_config(config: Mapping[str, Any], where: str, names: Collection[str] | None = None) -> tuple[Family, Config]:
    """Return the family and the dimensions of a config.json. Those of a multimodal model are of its text part.

    Args:
        config: The content of the file.
        where: The name of the file, for errors.
        names: The names of the tensors in the checkpoint, or None if they are not known yet.

    Raises:
        UserError: The family or a feature is not supported, or a value is missing or invalid.
    """
    wrapper, layout = wrapper_of(config), layout_in(names or ())
    if wrapper is None:
        family_of(config, where)  # an unknown family is reported before its other features
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "?") if isinstance(quantized, dict) else quantized
        raise Settings(config, where).refused(f"quantized weights ({method})")
    if wrapper is None:
        family, read = _read_text(config, where)
        return (family if layout is None else family.with_layout(layout, None)).stored_as(names or ()), read
    family, read = _read_text(text_config(wrapper, config, where, names), f"{where}: {TEXT}")
    return family.with_layout(layout or wrapper.layout, wrapper).stored_as(names or ()), read


def _read_text(config: Mapping[str, Any], where: str) -> tuple[Family, Config]:
    """Return the family and the dimensions of a text model."""
    family = family_of(config, where)
    settings = Settings(config, where)
    try:
        read = family.read(settings)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            "E-MODEL-002",
            f"{where} cannot be read as {family.model_type}",
            why=f"{type(error).__name__}: {str(error)[:500]}",
            fix="download the model again, or name another one",
        ) from error
    settings.finish(*_WITHOUT_EFFECT.get(family.model_type, ()))
    if fault := _misfit(read):
        raise UserError(
            "E-MODEL-003",
            f"{where} cannot be read as {family.model_type}",
            why=fault,
            fix="download the model again, or name another one",
        )
    return family, read


def compare_keys(config: Mapping[str, Any], model_type: str) -> Difference:
    """Return the keys of a config.json that the reader of a registered family does not understand."""
    return difference(config, FAMILIES[model_type], _WITHOUT_EFFECT.get(model_type, ()))


def _misfit(config: Config) -> str | None:
    """Return a text that names dimensions that do not fit each other, or None."""
    if config.heads % config.kv_heads:
        return f"{config.heads} heads cannot share {config.kv_heads} key/value heads"
    if isinstance(config, Gpt2Config):
        return (
            f"width {config.embed} does not divide into {config.heads} heads" if config.embed % config.heads else None
        )
    for kind in (*config.layer_kinds, *config.last_kinds):
        if config.size("H", kind.shape) % config.size("K", kind.shape):
            return f"{config.size('H', kind.shape)} heads cannot share {config.size('K', kind.shape)} key/value heads"
        if kind.rope is None:
            continue
        if kind.rope.dims < 2 or kind.rope.dims % 2:
            return f"RoPE rotates dimensions in pairs, and each head has {kind.rope.dims} rotated dimensions"
        match kind.rope.scaling:
            case LongRope(short, long) if {len(short), len(long)} != {kind.rope.dims // 2}:
                return f"LongRope has {len(short)} and {len(long)} factors for {kind.rope.dims // 2} pairs"
            case RopeScaling(low=low, high=high) if low >= high:
                return f"low_freq_factor {low} is not below high_freq_factor {high}"
    return None


def family_for(config: Config) -> Family:
    """Return the family that an export writes for dimensions that do not come from a checkpoint."""
    if not isinstance(config, DecoderConfig):
        return gpt2.FAMILY
    if config.attention_gate:
        return recurrent.QWEN3_5 if config.experts is None else recurrent.QWEN3_5_MOE
    if config.attention_sinks:
        return experts.GPT_OSS
    if config.experts is not None:
        return gemma.GEMMA4 if config.experts.beside else experts.QWEN3_MOE
    plain = not config.out_bias and not config.mlp_bias and not config.kinds and config.norms == "before"
    if plain and config.qk_norm and not config.qkv_bias and config.window is None:
        return llama.QWEN3
    as_qwen2 = config.qkv_bias and not config.qk_norm and config.head_dim * config.heads == config.embed
    if plain and as_qwen2 and config.window is None:
        return llama.QWEN2
    if plain and not config.qk_norm and not config.qkv_bias:
        return llama.LLAMA if config.window is None else llama.MISTRAL
    raise UserError(
        "E-MODEL-004",
        "no Hugging Face family computes this model",
        why=f"no family combines qkv_bias={config.qkv_bias}, qk_norm={config.qk_norm} and window={config.window}",
        fix="train with qk_norm (Qwen3), qkv_bias (Qwen2), window (Mistral) or none of them (Llama)",
    )


_WITHOUT_EFFECT = {
    "gpt2": ("n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
             "summary_first_dropout", "reorder_and_upcast_attn", "num_labels"),
    "phi3": ("embd_pdrop",),
    "gemma3_text": ("rope_local_base_freq",),
    "exaone4": ("sliding_window_pattern",),
    "granitemoehybrid": llama.WITHOUT_EFFECT_IN_GRANITE,
    "qwen3_5_text": recurrent.WITHOUT_EFFECT,
    "qwen3_5_moe_text": recurrent.WITHOUT_EFFECT_WITH_EXPERTS,
    "lfm2": recurrent.WITHOUT_EFFECT_IN_LFM2,
    "minimax_m2": experts.WITHOUT_EFFECT_IN_MINIMAX_M2,
    **dict.fromkeys(("qwen3_moe", "mixtral", "olmoe", "gpt_oss"), experts.WITHOUT_EFFECT),
}  # fmt: skip
