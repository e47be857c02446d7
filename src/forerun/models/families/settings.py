"""Checked access to a config.json. A key that no family reads is a feature that forerun does not support."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.config import limits
from forerun.config.schema import RopeScaling
from forerun.errors import UserError
from forerun.nn.rope import Linear, LongRope, Proportional, Scaling, Yarn, attention_factor, yarn_factor

# Keys that do not affect the computation: bookkeeping, generation defaults, training settings of other frameworks.
IGNORED_KEYS = {
    "architectures", "model_type", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "initializer_range", "initializer_factor", "max_position_embeddings", "return_dict", "output_hidden_states",
    "output_attentions", "id2label", "label2id", "problem_type", "task_specific_params", "chunk_size_feed_forward",
    "cache_implementation", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "finetuning_task", "tokenizer_class", "prefix", "tf_legacy_loss", "use_bfloat16", "torchscript", "auto_map",
    "unsloth_version", "unsloth_fixed", "rope_theta", "gradient_checkpointing", "max_length", "name_or_path",
}  # fmt: skip


@dataclass(frozen=True)
class Range:
    """The valid range of a number in a config.json."""

    kind: type[int] | type[float]
    above: float  # exclusive lower bound
    most: float  # inclusive upper bound

    def holds(self, value: object) -> bool:
        """Return whether `value` is a number of this kind in the range."""
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else int | float):
            return False
        return self.above < value <= self.most  # False for NaN. Integers of any size can be compared.


_LAYERS, _HEADS = Range(int, 0, limits.MAX_LAYERS), Range(int, 0, limits.MAX_HEADS)
_WIDTH, _MLP = Range(int, 0, limits.MAX_WIDTH), Range(int, 0, limits.MAX_MLP)
_POSITIONS = Range(int, 0, limits.MAX_POSITIONS)
_EPSILON, _THETA = Range(float, 0, 1), Range(float, 1, limits.MAX_THETA)
_FACTOR = Range(float, 0, limits.MAX_FACTOR)

# Every number that a family reads, including those in the RoPE section, by all names that the families use.
RANGES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "sliding_window_pattern", "_sliding_window_pattern"), _LAYERS),
    **dict.fromkeys(("no_rope_layer_interval", "full_attention_interval"), _LAYERS),
    "max_window_layers": Range(int, -1, limits.MAX_POSITIONS),
    **dict.fromkeys(("hidden_size", "n_embd"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), _HEADS),
    **dict.fromkeys(("head_dim", "global_head_dim"), Range(int, 0, limits.MAX_HEAD_WIDTH)),
    "num_global_key_value_heads": _HEADS,
    "num_kv_shared_layers": Range(int, -1, limits.MAX_LAYERS),
    "hidden_size_per_layer_input": Range(int, -1, limits.MAX_WIDTH),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), Range(int, 0, limits.MAX_VOCAB)),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), Range(int, 0, limits.MAX_HEAD_WIDTH)),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_L_cache"), Range(int, 1, limits.MAX_HEAD_WIDTH)),
    **dict.fromkeys(("intermediate_size", "n_inner", "block_ff_dim", "block_multiple_of"), _MLP),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), _POSITIONS),
    "n_positions": Range(int, 0, limits.MAX_VOCAB),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "norm_eps"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), _THETA),
    "partial_rotary_factor": Range(float, 0, 1),
    **dict.fromkeys(("factor", "attention_factor", "low_freq_factor", "high_freq_factor"), _FACTOR),
    **dict.fromkeys(("beta_fast", "beta_slow", "short_factor", "long_factor"), _FACTOR),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), _FACTOR),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), _FACTOR),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), _FACTOR),
    **dict.fromkeys(("shared_intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), _MLP),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "decoder_sparse_step"), Range(int, 0, limits.MAX_EXPERTS)),
    "rotary_dim": Range(int, 0, limits.MAX_HEAD_WIDTH),
    **dict.fromkeys(("num_experts", "num_local_experts"), Range(int, -1, limits.MAX_EXPERTS)),
    "router_aux_loss_coef": Range(float, -1e-9, limits.MAX_FACTOR),
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), _FACTOR),
    "initial_context_length": _POSITIONS,
    "experts_per_token": Range(int, 0, limits.MAX_EXPERTS),
    "block_ffn_dim_multiplier": _FACTOR,
}
ZERO_MEANS_ABSENT = ("mscale", "mscale_all_dim", "llama_4_scaling_beta")
FLAGS = (
    "tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_sliding_window",
    "truncate", "enable_moe_block", "attention_k_eq_v", "use_double_wide_mlp", "norm_topk_prob",
)  # fmt: skip
LISTS = ("short_factor", "long_factor")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKEN_ID = Range(int, -2, limits.MAX_VOCAB)  # -1 means none in early Llama files


class Settings:
    """A config.json that records which keys were read.

    `take` reads a key and checks its range. `finish` rejects the keys that were not read.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return the checked value of `key`, or `default` if it is missing or null."""
        self._taken.add(key)
        value = self._checked(key, self.config.get(key))
        return default if value is None else value

    def _checked(self, key: str, value: Any) -> Any:
        """Return `value`. Raise a UserError if it is neither None nor in the range of its key."""
        if key in ZERO_MEANS_ABSENT and isinstance(value, int | float) and value is not False and value == 0:
            return None
        allowed = RANGES.get(key)
        if value is None or (allowed is None and key not in FLAGS):
            return value
        if allowed is None:
            if not isinstance(value, bool | int) or value not in (0, 1):
                raise self._unusable(key, value, "it must be true or false")
        elif not all(map(allowed.holds, value if isinstance(value, list) and key in LISTS else [value])):
            kind = "an integer" if allowed.kind is int else "a number"
            raise self._unusable(key, value, f"it must be {kind} above {allowed.above:g}, and at most {allowed.most:g}")
        return value

    def need(self, key: str, kind: type = int) -> Any:
        """Return the checked value of `key`. Raise a UserError if it is missing or has another type."""
        value = self.take(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._unusable(key, value, "the dimensions of the model depend on it")
        return value

    def _unusable(self, key: str, value: Any, why: str) -> UserError:
        return UserError(
            "E-MODEL-005",
            f"{self.where} has no valid {key}",
            why=f"it is {reprlib.repr(value)}; {why}",
            fix="download the model again, or name another one",
        )

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """Return the value of `key`. Raise a UserError unless it is one of the supported values."""
        value = self.take(key, default)
        if value not in allowed:
            raise self.refused(f"{key}: {reprlib.repr(value)}")
        return value

    def refused(self, feature: str) -> UserError:
        """Return the error for a feature that forerun does not support."""
        return UserError(
            "E-MODEL-006",
            f"{self.where} needs {feature}, which forerun does not support",
            why="without this feature the results of the model would be silently wrong",
            fix="choose another model, or another revision of this one",
        )

    def finish(self, *more: str) -> None:
        """Raise a UserError for a key that was not read, unless it has no effect.

        `more` are additional keys that have no effect in this family.
        """
        for key in TOKEN_IDS:
            ids = self.config.get(key)
            if ids is not None and not all(map(_TOKEN_ID.holds, ids if isinstance(ids, list) else [ids])):
                raise self._unusable(key, ids, "it must be a token id, or a list of them")
        for key in self.unread(*more):
            raise self.refused(f"{key}: {reprlib.repr(self.config[key])}")

    def unread(self, *more: str) -> list[str]:
        """Return the keys with an effect that were not read. `more` are additional keys that have no effect."""
        known = self._taken | IGNORED_KEYS | set(more)
        unknown = {key: value for key, value in self.config.items() if key not in known}
        return [key for key, value in unknown.items() if value not in (None, False, 0, 0.0, {}, [])]

    @property
    def has_rope_section(self) -> bool:
        """Whether the file has a section on RoPE, under its new or its old name."""
        return self.take("rope_parameters") is not None or self.take("rope_scaling") is not None

    def rope_value(self, key: str) -> Any:
        """Return the checked value of `key` in the RoPE section, or None."""
        return self._checked(key, dict(self.take("rope_parameters") or self.take("rope_scaling") or {}).get(key))

    def rope(
        self,
        default_theta: float,
        layer_type: str | None = None,
        *,
        partial: bool = False,
        elsewhere: Sequence[str] = (),
        proportional: bool = False,
        without_effect: tuple[str, ...] = (),
    ) -> tuple[float, Scaling | None]:
        """Return theta and the scaling of RoPE.

        transformers 5 writes `rope_parameters`; older versions write `rope_theta` and `rope_scaling`.

        Args:
            default_theta: The family's default for theta.
            layer_type: The key of this layer type in `rope_parameters`, if the layer types have separate settings.
            partial: Whether the family supports rotation of only a part of each head.
            elsewhere: Keys of the section that the family reads with `rope_value`.
            proportional: Whether the family supports proportional RoPE.
            without_effect: Keys of the RoPE section that have no effect in this family.
        """
        given = self.take("rope_parameters")
        if given is not None and layer_type and layer_type in given:
            given = given[layer_type]
        scaling = {
            key: self._checked(key, value)
            for key, value in dict(given or self.take("rope_scaling") or {}).items()
            if key not in elsewhere
        }
        self.take("rope_scaling")
        theta = float(scaling.pop("rope_theta", None) or self.take("rope_theta", default_theta))
        share = scaling.pop("partial_rotary_factor", None)
        if proportional and scaling.get("rope_type") == "proportional":
            del scaling["rope_type"]
            found = Proportional(float(share or 1.0), float(scaling.pop("factor", None) or 1.0))
            self._nothing_left(scaling)
            return theta, found
        if share not in (None, 1.0) and not partial:
            raise self.refused(f"partial_rotary_factor: {share!r}")
        for key in without_effect:
            scaling.pop(key, None)
        return theta, self._scaling(scaling)

    def _scaling(self, given: dict[str, Any]) -> Scaling | None:
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        longest = self.take("max_position_embeddings", 0)
        original = given.pop("original_max_position_embeddings", None) or self.take("original_max_position_embeddings")
        factor, attention = given.pop("factor", None), given.pop("attention_factor", None)
        found: Scaling | None
        if kind == "default":
            found = None
        elif kind == "linear":
            found = Linear(float(factor))
        elif kind == "llama3":
            found = RopeScaling(
                factor=float(factor),
                low=float(given.pop("low_freq_factor")),
                high=float(given.pop("high_freq_factor")),
                original=int(original),
            )
        elif kind == "yarn":
            original = original or longest
            factor = float(factor or longest / original)
            attention = self._yarn_attention(given, factor, attention)
            found = Yarn(
                factor=factor,
                original=int(original),
                fast=float(given.pop("beta_fast", None) or 32),
                slow=float(given.pop("beta_slow", None) or 1),
                attention=attention_factor(factor, attention, int(original), kind="yarn"),
                truncate=bool(given.pop("truncate", True)),
            )
        elif kind in ("longrope", "su"):
            factor = float(factor or longest / original)
            found = LongRope(
                short=tuple(map(float, given.pop("short_factor"))),
                long=tuple(map(float, given.pop("long_factor"))),
                original=int(original),
                attention=attention_factor(factor, attention, int(original), kind="longrope"),
            )
        else:
            raise self.refused(f"RoPE scaling {kind!r}")
        self._nothing_left(given)
        return found

    def _nothing_left(self, given: dict[str, Any]) -> None:
        """Raise a UserError for a setting of RoPE that was not read."""
        if left := {key: value for key, value in given.items() if value is not None}:
            raise self.refused(f"RoPE scaling with {', '.join(sorted(left))}")

    def _yarn_attention(self, given: dict[str, Any], factor: float, attention: float | None) -> float | None:
        """Return YaRN's factor for cos and sin, or None for the default formula. Remove its keys from `given`."""
        scale, scale_all = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        if attention is not None:
            return attention
        if scale and scale_all:
            return yarn_factor(factor, scale) / yarn_factor(factor, scale_all)
        # Implementations disagree on one of the two without the other, except for a scale of 1: the default formula.
        if (scale or scale_all or 1.0) != 1.0:
            raise self.refused("RoPE scaling with only one of mscale and mscale_all_dim")
        return None


def rope_json(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """Return the `rope_parameters` section of transformers 5. Raise a ValueError for other kinds of scaling."""
    base: dict[str, Any] = {"rope_theta": theta}
    match scaling:
        case None:
            return base | {"rope_type": "default"}
        case Linear(factor):
            return base | {"rope_type": "linear", "factor": factor}
        case RopeScaling():
            return base | {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }
        case Yarn():
            return base | {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "attention_factor": scaling.attention,
                "truncate": scaling.truncate,
                "original_max_position_embeddings": scaling.original,
            }
        case Proportional(share, factor):
            return base | {"rope_type": "proportional", "partial_rotary_factor": share, "factor": factor}
    raise ValueError(f"{scaling} comes from a checkpoint, so export must keep the config.json of the checkpoint")
