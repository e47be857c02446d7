"""The named decoder sizes with their exact published dimensions, and free dimensions of a job.

Does not import jax, so that errors appear quickly. The sizes come from the `config.json` of each model's Hugging Face
repository. A test compares the parameter counts with the published ones.
"""

from __future__ import annotations

from dataclasses import fields, replace

from forerun.config.schema import Model, RopeScaling
from forerun.errors import UserError, did_you_mean
from forerun.models.decoder_config import ClampedGate, DecoderConfig, ExpertConfig
from forerun.models.layer_kinds import LayerKind, LayerShape
from forerun.nn.rope import Proportional, Rope, Yarn, attention_factor


def _qwen2(layers: int, embed: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        layers, embed, heads, kv_heads, embed // heads, mlp, vocab, tied, qkv_bias=True, rope_theta=1e6
    )


def _qwen3(layers: int, embed: int, heads: int, mlp: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(layers, embed, heads, 8, 128, mlp, 151_936, tied, qk_norm=True, rope_theta=1e6)


def _llama3(layers: int, embed: int, heads: int, mlp: int, tied: bool, factor: float) -> DecoderConfig:
    scaling = RopeScaling(factor=factor)
    head_dim = embed // heads
    return DecoderConfig(
        layers, embed, heads, 8, head_dim, mlp, 128_256, tied, rope_theta=5e5, rope_scaling=scaling, norm_eps=1e-5
    )


def _smollm2(layers: int, embed: int, heads: int, kv_heads: int, mlp: int, theta: float) -> DecoderConfig:
    return DecoderConfig(layers, embed, heads, kv_heads, 64, mlp, 49_152, rope_theta=theta, norm_eps=1e-5)


def delta_shape(heads: int, key_heads: int, key_dim: int, value_dim: int, width: int) -> LayerShape:
    """Return the shape of layers with the gated delta rule."""
    return LayerShape(
        "linear", "delta", heads=heads, kv_heads=key_heads, head_dim=key_dim, value_dim=value_dim, width=width
    )


def _qwen3_5(
    layers: int, embed: int, heads: int, kv_heads: int, mlp: int, delta_heads: int, tied: bool,
    experts: ExpertConfig | None = None,
) -> DecoderConfig:  # fmt: skip
    theta, head_dim, dims = 1e7, 256, 64
    delta = LayerKind(None, None, delta_shape(delta_heads, 16, 128, 128, 4))
    return DecoderConfig(
        layers, embed, heads, kv_heads, head_dim, mlp, 248_320, tied, qk_norm=True, rope_theta=theta, rope_dims=dims,
        norm_around_one=True, attention_gate=True, experts=experts,
        kinds=(delta, delta, delta, LayerKind(None, Rope(theta, dims, None), LayerShape("full"))),
    )  # fmt: skip


_QWEN3_30B = DecoderConfig(
    48, 2048, 32, 4, 128, 6144, 151_936, tied=False, qk_norm=True, rope_theta=1e6,  # the width 6144 is not used
    experts=ExpertConfig(count=128, top=8, mlp=768, balance_loss=0.001),
)  # fmt: skip

GPT_OSS_YARN = Yarn(32.0, 4096, attention=attention_factor(32.0, None, 4096, kind="yarn"), truncate=False)


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    theta, head_dim, width = 150_000.0, 64, 2880
    rope = Rope(theta, head_dim, GPT_OSS_YARN)
    return DecoderConfig(
        layers, width, 64, 8, head_dim, width, 201_088, tied=False, qkv_bias=True, out_bias=True, norm_eps=1e-5,
        rope_theta=theta, rope_scaling=GPT_OSS_YARN, attention_sinks=True,
        kinds=(LayerKind(128, rope), LayerKind(None, rope)),
        experts=ExpertConfig(experts, 4, width, balance_loss=0.9, bias=True, clamped=ClampedGate(1.702, 7.0)),
    )  # fmt: skip


def _gemma4_26b() -> DecoderConfig:
    local = LayerKind(1024, Rope(1e4, 256), LayerShape("sliding"))
    whole = LayerShape("full", head_dim=512, kv_heads=2, key_is_value=True)
    return DecoderConfig(
        30, 2816, 16, 8, 256, 2112, 262_144, tied=True, qk_norm=True, value_norm=True, norms="both", activation="gelu",
        embed_scale=2816**0.5, query_scale=1.0, logit_softcap=30.0, layer_scalar=True,
        kinds=(*[local] * 5, LayerKind(None, Rope(1e6, 512, Proportional(0.25)), whole)),
        experts=ExpertConfig(count=128, top=8, mlp=704, beside=True),
    )  # fmt: skip


_MIXTRAL_EXPERTS = ExpertConfig(count=8, top=2, mlp=14_336, balance_loss=0.02)
_QWEN3_5_EXPERTS = ExpertConfig(count=256, top=8, mlp=512, balance_loss=0.001, shared=True)

_QWEN3_5_35B = _qwen3_5(40, 2048, 16, 2, 512, 32, tied=False, experts=_QWEN3_5_EXPERTS)
# v0.1, the one with the sliding window
_MISTRAL_7B = DecoderConfig(32, 4096, 32, 8, 128, 14_336, 32_000, tied=False, window=4096, norm_eps=1e-5)
_MIXTRAL_8X7B = DecoderConfig(
    32, 4096, 32, 8, 128, 14_336, 32_000, tied=False, rope_theta=1e6, norm_eps=1e-5, experts=_MIXTRAL_EXPERTS
)
# Each size with the hub repository of its pretrained weights. A named size itself has random weights.
_PUBLISHED: dict[str, tuple[str, DecoderConfig]] = {
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", _qwen2(24, 896, 14, 2, 4864, 151_936, tied=True)),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B", _qwen2(28, 1536, 12, 2, 8960, 151_936, tied=True)),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", _qwen2(28, 3584, 28, 4, 18_944, 152_064, tied=False)),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", _qwen3(28, 1024, 16, 3072, tied=True)),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", _qwen3(28, 2048, 16, 6144, tied=True)),
    "qwen3-4b": ("Qwen/Qwen3-4B", _qwen3(36, 2560, 32, 9728, tied=True)),
    "qwen3-8b": ("Qwen/Qwen3-8B", _qwen3(36, 4096, 32, 12_288, tied=False)),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B-Base", _QWEN3_30B),
    "qwen3.5-0.8b": ("Qwen/Qwen3.5-0.8B", _qwen3_5(24, 1024, 8, 2, 3584, 16, tied=True)),
    "qwen3.5-2b": ("Qwen/Qwen3.5-2B", _qwen3_5(24, 2048, 8, 2, 6144, 16, tied=True)),
    "qwen3.5-4b": ("Qwen/Qwen3.5-4B", _qwen3_5(32, 2560, 16, 4, 9216, 32, tied=True)),
    "qwen3.5-9b": ("Qwen/Qwen3.5-9B", _qwen3_5(32, 4096, 16, 4, 12_288, 32, tied=False)),
    "qwen3.5-27b": ("Qwen/Qwen3.5-27B", _qwen3_5(64, 5120, 24, 4, 17_408, 48, tied=False)),
    "qwen3.5-35b-a3b": ("Qwen/Qwen3.5-35B-A3B-Base", _QWEN3_5_35B),
    "llama3.2-1b": ("meta-llama/Llama-3.2-1B", _llama3(16, 2048, 32, 8192, tied=True, factor=32.0)),
    "llama3.2-3b": ("meta-llama/Llama-3.2-3B", _llama3(28, 3072, 24, 8192, tied=True, factor=32.0)),
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B", _llama3(32, 4096, 32, 14_336, tied=False, factor=8.0)),
    "llama3.1-70b": ("meta-llama/Llama-3.1-70B", _llama3(80, 8192, 64, 28_672, tied=False, factor=8.0)),
    "llama3.1-405b": ("meta-llama/Llama-3.1-405B", _llama3(126, 16_384, 128, 53_248, tied=False, factor=8.0)),
    "gpt-oss-20b": ("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    "gpt-oss-120b": ("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    "gemma-4-26b-a4b": ("google/gemma-4-26B-A4B", _gemma4_26b()),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M", _smollm2(30, 576, 9, 3, 1536, 1e5)),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M", _smollm2(32, 960, 15, 5, 2560, 1e5)),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B", _smollm2(24, 2048, 32, 32, 8192, 1.3e5)),
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", _MISTRAL_7B),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", _MIXTRAL_8X7B),
}
SIZES = {name: config for name, (_, config) in _PUBLISHED.items()}
HUB_NAMES = {name: repository for name, (repository, _) in _PUBLISHED.items()}


_KEYS_OF_KINDS = ("head_dim", "window", "rope_theta", "rope_scaling", "qkv_bias", "qk_norm")
UNUSED_IDS = 512  # published vocabularies have up to 399 ids that their tokenizer does not use


def is_plugin(model: Model) -> bool:
    """Return whether the job names a custom class (`module.path:Class`)."""
    return model.name is not None and ":" in model.name


def decoder_config(model: Model, tokenizer_vocab: int | None = None) -> DecoderConfig:
    """Return the dimensions of a named size or of free dimensions. Other keys of the section override a named size.

    Args:
        model: A model section without a checkpoint or a custom class.
        tokenizer_vocab: The number of ids of the job's tokenizer, for a section that sets no vocabulary. A named size
            keeps its published vocabulary if that is the tokenizer's with fewer than 512 unused ids.

    Raises:
        UserError: The name is unknown, or the dimensions are incomplete or do not fit each other.
    """
    given = {f.name: value for f in fields(DecoderConfig) if (value := getattr(model, f.name, None)) is not None}
    if model.name is None:
        return _free(given, tokenizer_vocab)
    if model.name not in SIZES:
        raise _unknown(model.name)
    size = SIZES[model.name]
    if tokenizer_vocab is not None and not 0 <= size.vocab - tokenizer_vocab < UNUSED_IDS:
        size = replace(size, vocab=padded_vocab(tokenizer_vocab))
    fixed = [key for key in _KEYS_OF_KINDS if size.kinds and given.get(key, getattr(size, key)) != getattr(size, key)]
    if fixed:
        raise UserError(
            "E-MODEL-041",
            f"model.{fixed[0]} cannot be changed in {model.name}",
            why="its layers have different shapes and positions, which one value does not describe",
            fix=f"remove model.{fixed[0]}, or choose another named size, such as qwen3-0.6b",
        )
    if size.experts is not None and "mlp" in given:
        raise UserError(
            "E-MODEL-042",
            f"model.mlp cannot be changed in {model.name}",
            why="its layers have experts, whose widths this key does not set",
            fix="remove model.mlp, or choose a named size without experts, such as qwen3-0.6b",
        )
    return _checked(replace(size, **given))


def padded_vocab(ids: int) -> int:
    """Return the number of ids rounded up to a multiple of 128, which fills TPU lanes and which any mesh divides."""
    return -(-ids // 128) * 128


def _unknown(name: str) -> UserError:
    """Return the error for an unknown name. It suggests the pretrained model first, then the named size."""
    plain = {_letters(size): size for size in SIZES}
    known = [size for letters, size in plain.items() if _letters(name).startswith(letters)]
    size = max(known, key=len) if known else plain.get(did_you_mean(_letters(name), plain) or "")
    if size is None:
        fix = "name a checkpoint (owner/name on the hub, or a folder as ./name), or give layers, embed and heads"
    else:
        owner = HUB_NAMES[size].partition("/")[0]
        longer = _letters(name) != _letters(size) and known
        hub = f"{owner}/{name}" if longer else HUB_NAMES[size]
        fix = f"pretrained weights: model={hub}; random weights of that size: model={size}"
    return UserError(
        "E-MODEL-013",
        f"model: {name!r} is neither a name on the hub nor a named size",
        why=f"a name on the hub is owner/name; the named sizes, which have no weights, are {', '.join(SIZES)}",
        fix=fix,
    )


def _letters(name: str) -> str:
    """Return the name in lower case with only letters, digits and dots, for comparisons."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")


def _free(given: dict[str, int], tokenizer_vocab: int | None) -> DecoderConfig:
    """Return free dimensions. `given` must have layers, embed and heads; the others have defaults."""
    missing = [name for name in ("layers", "embed", "heads") if name not in given]
    if missing:
        raise UserError(
            "E-MODEL-014",
            f"the model lacks {', '.join(missing)}",
            why="a model without a name needs at least layers, embed and heads",
            fix=f"add model.{missing[0]}; or name a checkpoint, such as model: Qwen/Qwen3-0.6B",
        )
    embed, heads = given["embed"], given["heads"]
    if "head_dim" not in given and embed % heads:
        raise UserError(
            "E-MODEL-015",
            f"model.embed {embed} does not divide into {heads} heads",
            why="head_dim is embed / heads unless it is set",
            fix=f"set model.embed={-(-embed // heads) * heads}, or set model.head_dim",
        )
    derived = {
        "kv_heads": heads,
        "head_dim": embed // heads,
        "mlp": -(-8 * embed // 3 // 64) * 64,
    }
    if "vocab" not in given:
        if tokenizer_vocab is None:
            raise UserError(
                "E-MODEL-016",
                "the model's vocabulary is not known",
                why="neither model.vocab nor a tokenizer gives it",
                fix="set model.vocab",
            )
        derived["vocab"] = padded_vocab(tokenizer_vocab)
    return _checked(DecoderConfig(**{**derived, **given}))  # type: ignore[arg-type]


def _checked(config: DecoderConfig) -> DecoderConfig:
    if config.head_dim % 2:
        raise UserError(
            "E-MODEL-017",
            f"model.head_dim is {config.head_dim}, an odd number",
            why="RoPE rotates dimensions in pairs",
            fix=f"set model.head_dim={config.head_dim + 1}",
        )
    if config.heads % config.kv_heads:
        raise UserError(
            "E-MODEL-018",
            f"{config.heads} heads cannot share {config.kv_heads} kv_heads",
            why="each key/value head serves the same number of query heads",
            fix=f"set model.kv_heads to a divisor of {config.heads}",
        )
    return config
