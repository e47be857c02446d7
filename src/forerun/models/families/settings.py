"""A config.json, read key by key: what nobody has asked for in the end is a feature that forerun does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.config.schema import RopeScaling
from forerun.errors import UserError
from forerun.nn.rope import Linear, LongRope, Scaling, Yarn, attention_factor

# Bookkeeping, generation defaults, and what concerns training in other frameworks only.
BYSTANDERS = {
    "architectures", "model_type", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "initializer_range", "initializer_factor", "max_position_embeddings", "return_dict", "output_hidden_states",
    "output_attentions", "id2label", "label2id", "problem_type", "task_specific_params", "chunk_size_feed_forward",
    "cache_implementation", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "finetuning_task", "tokenizer_class", "prefix", "tf_legacy_loss", "use_bfloat16", "torchscript", "auto_map",
    "unsloth_version", "unsloth_fixed", "rope_theta", "gradient_checkpointing", "max_length", "name_or_path",
}  # fmt: skip


class Settings:
    """`take` reads a key; `finish` refuses whatever is left."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        self._taken.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def need(self, key: str, kind: type = int) -> Any:
        value = self.take(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(
                f"{self.where} has no usable {key}",
                why=f"it is {value!r}, and the model's dimensions follow from it",
                fix="download the model again, or name another one",
            )
        return value

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """One of the values that are implemented."""
        value = self.take(key, default)
        if value not in allowed:
            raise self.refused(f"{key}: {value!r}")
        return value

    def refused(self, feature: str) -> UserError:
        return UserError(
            f"{self.where} asks for {feature}, which forerun does not have",
            why="a model that is computed another way than it was trained gives wrong results without a word",
            fix="choose another model, or another revision of this one",
        )

    def finish(self, *more: str) -> None:
        """`more` are keys that a family knows to be without effect."""
        known = self._taken | BYSTANDERS | set(more)
        for key, value in self.config.items():
            if key not in known and value not in (None, False, 0, 0.0, {}, []):
                raise self.refused(f"{key}: {value!r}")

    def rope(
        self, default_theta: float, layer_type: str | None = None, *, partial: bool = False
    ) -> tuple[float, Scaling | None]:
        """theta and scaling; transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
        given = self.take("rope_parameters")
        if given is not None and layer_type and layer_type in given:
            given = given[layer_type]
        scaling = dict(given or self.take("rope_scaling") or {})
        self.take("rope_scaling")
        theta = float(scaling.pop("rope_theta", None) or self.take("rope_theta", default_theta))
        share = scaling.pop("partial_rotary_factor", None)
        if share not in (None, 1.0) and not partial:
            raise self.refused(f"partial_rotary_factor: {share!r}")
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
        if left := {key: value for key, value in given.items() if value is not None}:
            raise self.refused(f"RoPE scaling with {', '.join(sorted(left))}")
        return found


def rope_json(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """As `rope_parameters` of transformers 5."""
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
    raise ValueError(f"{scaling} comes with a checkpoint, whose own config.json is kept")
