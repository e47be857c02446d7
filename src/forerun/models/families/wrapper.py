"""Multimodal checkpoints whose text part is a model of a family: their config.json and the names of their tensors.

A wrapper has the settings of the text model in `text_config`, and a prefix before the names of its tensors. forerun
trains the text part. Every other tensor (vision and audio towers, projectors) is copied unchanged into an export.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.errors import UserError
from forerun.models.families.settings import Settings
from forerun.models.keys import Tensor

TEXT = "text_config"
TIED = "tie_word_embeddings"
_BODY, _HEAD = "model.", "lm_head."  # what the names of a text model start with


@dataclass(frozen=True)
class Layout:
    """The names of a wrapped text model: what replaces `model.` and `lm_head.` at their start."""

    body: str
    head: str

    def name(self, plain: str) -> str:
        """Return the wrapped name of a tensor of the text model."""
        for start, wrapped in ((_BODY, self.body), (_HEAD, self.head)):
            if plain.startswith(start):
                return wrapped + plain.removeprefix(start)
        raise ValueError(f"{plain} starts with neither {_BODY} nor {_HEAD}")

    def plain(self, name: str) -> str:
        """Return the name in the text model of a wrapped tensor."""
        if name.startswith(self.body):
            return _BODY + name.removeprefix(self.body)
        return _HEAD + name.removeprefix(self.head) if name.startswith(self.head) else name

    def table(self, table: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return a table of tensors with the wrapped names."""
        return tuple(replace(one, name=self.name(one.name)) for one in table)


INNER = Layout("model.language_model.", "lm_head.")  # also the modules of every wrapper in transformers 5
OUTER = Layout("language_model.model.", "language_model.lm_head.")  # most files of Gemma 3 and Mistral 3
LAYOUTS = (INNER, OUTER)


@dataclass(frozen=True)
class Wrapper:
    """A kind of multimodal checkpoint. `text_config.model_type` names the family of its text part.

    Attributes:
        text: The family of the text part if `text_config` has no model_type.
        layout: The names of the tensors if the files are not downloaded yet.
        keys: The keys of config.json that have no effect on text.
        parts: The first words in the names of all other tensors, after an optional `model.`.
        defaults: Values that published files leave out of `text_config`.
    """

    model_type: str
    text: str
    layout: Layout
    keys: tuple[str, ...]
    parts: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def is_other(self, name: str) -> bool:
        """Return whether a tensor belongs to another part than the text model."""
        return name.removeprefix(_BODY).startswith(tuple(f"{part}." for part in self.parts))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The entries of `ignore` in a `quantization_config` that leave the other parts unrounded."""
        return tuple(f"re:.*{part}.*" for part in self.parts)


_VISION = ("text_config", "vision_config")
_GEMMA4 = (
    *_VISION, "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id",
    "eoa_token_id", "eoa_token_index", "audio_token_id", "vision_soft_tokens_per_image",
)  # fmt: skip
WRAPPERS = {
    wrapper.model_type: wrapper
    for wrapper in (
        Wrapper(
            "gemma3",
            "gemma3_text",
            OUTER,
            (*_VISION, "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
            ("vision_tower", "multi_modal_projector"),
            # The files of the 4B, 12B and 27B models have only the values that differ from these.
            {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208},
        ),
        Wrapper(
            "mistral3",
            "mistral",
            OUTER,
            (*_VISION, "image_token_index", "image_token_id", "multimodal_projector_bias", "projector_hidden_act",
             "spatial_merge_size", "vision_feature_layer"),
            ("vision_tower", "multi_modal_projector"),
        ),
        *(
            Wrapper(
                kind,
                f"{kind}_text",
                INNER,
                (*_VISION, "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
                ("visual", "mtp"),
            )
            for kind in ("qwen3_5", "qwen3_5_moe")
        ),
        Wrapper(
            "gemma4",
            "gemma4_text",
            INNER,
            _GEMMA4,
            ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        ),
        Wrapper(
            "gemma4_unified",
            "gemma4_unified_text",
            INNER,
            _GEMMA4,
            ("vision_embedder", "embed_vision", "embed_audio"),
        ),
    )
}  # fmt: skip


PATTERNS = frozenset(pattern for wrapper in WRAPPERS.values() for pattern in wrapper.patterns)


def wrapper_of(config: Mapping[str, Any]) -> Wrapper | None:
    """Return the wrapper of a config.json, or None for a text model."""
    kind = config.get("model_type")
    return WRAPPERS.get(kind) if isinstance(kind, str) else None


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the text model: `text_config`, or the complete file."""
    found = config.get(TEXT)
    return found if isinstance(found, Mapping) else config


def may_have_prefix(config: Mapping[str, Any]) -> bool:
    """Return whether the names of the tensors must be known: those of a wrapper or of its text part have a prefix."""
    return wrapper_of(config) is not None or str(config.get("model_type")).endswith("_text")


def layout_in(names: Iterable[str]) -> Layout | None:
    """Return the layout that the tensors of a checkpoint have, or None for names without a prefix."""
    return next((layout for name in names for layout in LAYOUTS if name.startswith(layout.body)), None)


def text_config(
    wrapper: Wrapper, config: Mapping[str, Any], where: str, names: Collection[str] | None
) -> dict[str, Any]:
    """Return the settings of the text model, complete with those that transformers takes from elsewhere.

    Args:
        wrapper: The kind of checkpoint.
        config: Its config.json.
        where: The name of the file, for errors.
        names: The names of its tensors, or None if they are not known yet.

    Raises:
        UserError: `text_config` is missing, or a key of config.json is unknown.
    """
    text = config.get(TEXT)
    if not isinstance(text, Mapping):
        raise UserError(
            "E-MODEL-040",
            f"{where} has no {TEXT}",
            why=f"a {wrapper.model_type} checkpoint describes its text model there, and forerun trains only that part",
            fix="download the model again, or name another one",
        )
    outer = Settings(config, where)
    tied = _tied(outer.take(TIED), Settings(text, where).take(TIED), names)
    outer.finish(*wrapper.keys)
    found = {"model_type": wrapper.text, **wrapper.defaults, **text}
    return found if tied is None else {**found, TIED: tied}


def _tied(outer: bool | None, inner: bool | None, names: Collection[str] | None) -> bool | None:
    """Return whether the head is tied to the embedding, or None for the default of the text family.

    transformers reads the outer value, which is true by default, and still does not tie a head whose stored values
    differ from the embedding. Mistral Small is such a checkpoint: a head is stored, and the outer value is missing.
    """
    if outer is not None and not outer:
        return False
    if names is None or any(layout.head + "weight" in names for layout in LAYOUTS):
        return inner
    return True
