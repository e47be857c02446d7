"""Tiny multimodal checkpoints that transformers writes, in the names and config keys that exist on the hub.

torch and transformers are imported inside functions only.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import randomize

from forerun.weights_io import documents

WINDOW = 6
TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PROCESSORS = {
    "preprocessor_config.json": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
    "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
}


def _gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = TEXT | {
        "model_type": "gemma3_text",
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = VISION | {"model_type": "siglip_vision_model"}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=299)
    return Gemma3ForConditionalGeneration(config)


def _mistral3(tied: bool) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = TEXT | {"model_type": "mistral", "sliding_window": None}
    vision = VISION | {"model_type": "pixtral"}
    config = Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=10, vision_feature_layer=-1, tie_word_embeddings=tied
    )
    return Mistral3ForConditionalGeneration(config)


QWEN3_5_TEXT = TEXT | {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # The keys of the published files that transformers does not know.
    "attn_output_gate": True,
    "full_attention_interval": 2,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def _qwen3_5(kind: str = "Qwen3_5", more: Mapping[str, Any] = {}) -> Any:
    import transformers

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": TEXT["hidden_size"], "num_position_embeddings": 16}
    tokens = {"image_token_id": 299, "video_token_id": 298, "vision_start_token_id": 297, "vision_end_token_id": 296}
    config = getattr(transformers, f"{kind}Config")(text_config=QWEN3_5_TEXT | more, vision_config=vision, **tokens)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _fused(names: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with all experts of a layer in two of them, as in the published Qwen3.5-35B-A3B.

    The weights of its multi-token prediction have one tensor per expert.
    """
    found = {name: one for name, one in names.items() if ".experts." not in name}
    for layer in range(2):
        start = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([names[f"{start}{n}.{part}_proj.weight"] for n in range(EXPERTS["num_experts"])])
            for part in ("gate", "up", "down")
        )
        found |= {f"{start}gate_up_proj": np.concatenate([gate, up], axis=1), f"{start}down_proj": down}
    return _added(PREDICTION | {"mtp.layers.0.mlp.experts.0.gate_proj.weight": (24, 32)})(found)


GEMMA4_TEXT = TEXT | {"sliding_window": WINDOW, "global_head_dim": 16, "final_logit_softcapping": 30.0}
GEMMA4_VISION = {key: value for key, value in VISION.items() if key != "image_size"} | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
GEMMA4_TOKENS = {"image_token_id": 299, "video_token_id": 298, "audio_token_id": 297}


def _gemma4() -> Any:
    """Return a model of the kind of E2B: per-layer embeddings, and two layers with keys and values of earlier ones."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = GEMMA4_TEXT | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": TEXT["vocab_size"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    }
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 24}
    audio |= {"subsampling_conv_channels": [4, 2]}
    return Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=text, vision_config=GEMMA4_VISION, audio_config=audio, **GEMMA4_TOKENS)
    )


def _gemma4_experts() -> Any:
    """Return a model of the kind of 26B-A4B: experts beside the MLP of each layer."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = GEMMA4_TEXT | {
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }
    return Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=text, vision_config=GEMMA4_VISION, audio_config=None, **GEMMA4_TOKENS)
    )


def _gemma4_unified() -> Any:
    """Return a model of the kind of 12B: the keys of a global layer are also its values."""
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    text = GEMMA4_TEXT | {
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    width = TEXT["hidden_size"]
    vision = {"patch_size": 4, "mm_embed_dim": width, "mm_posemb_size": 8, "output_proj_dims": width}
    config = Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 16}, **GEMMA4_TOKENS
    )
    return Gemma4UnifiedForConditionalGeneration(config)


def _inner(names: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with the names of transformers' own modules, as some checkpoints on the hub have them."""
    return {"model." + name.replace("language_model.model.", "language_model."): one for name, one in names.items()}


# Tensors of published files that transformers neither loads nor saves.
PREDICTION = {
    "mtp.fc.weight": (32, 64),
    "mtp.layers.0.self_attn.q_proj.weight": (128, 32),
    "mtp.norm.weight": (32,),
    "mtp.pre_fc_norm_embedding.weight": (32,),
}
SHARED = {
    f"model.language_model.layers.{layer}.self_attn.{name}.weight": shape
    for layer, width in ((2, 8), (3, 16))
    for name, shape in {"k_proj": (2 * width, 32), "v_proj": (2 * width, 32), "k_norm": (width,)}.items()
}


def _added(
    shapes: Mapping[str, tuple[int, ...]],
) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return a function that adds random tensors in bfloat16 to a checkpoint."""
    drawn = np.random.default_rng(7).normal
    return lambda names: {**names, **{name: drawn(size=one).astype(ml_dtypes.bfloat16) for name, one in shapes.items()}}


def _without_ties(config: dict[str, Any]) -> None:
    """Remove the keys that the published Mistral Small does not have, although its head is separate."""
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]


@dataclass(frozen=True)
class Wrapped:
    make: Callable[[], Any]
    names: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]] = dict
    config: Callable[[dict[str, Any]], None] = lambda content: None


CHECKPOINTS = {
    "gemma3": Wrapped(_gemma3),
    "gemma3, names of modules": Wrapped(_gemma3, _inner),
    "mistral3, tied": Wrapped(lambda: _mistral3(True)),
    "mistral3, published": Wrapped(lambda: _mistral3(False), dict, _without_ties),
    "qwen3_5": Wrapped(_qwen3_5, _added(PREDICTION)),
    "qwen3_5_moe": Wrapped(lambda: _qwen3_5("Qwen3_5Moe", EXPERTS)),
    "qwen3_5_moe, published": Wrapped(lambda: _qwen3_5("Qwen3_5Moe", EXPERTS), _fused),
    "gemma4": Wrapped(_gemma4, _added(SHARED)),
    "gemma4, experts": Wrapped(_gemma4_experts),
    "gemma4_unified": Wrapped(_gemma4_unified),
}


@cache
def checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint with random norms, a byte tokenizer and processor files."""
    one = CHECKPOINTS[name]
    model = one.make()
    randomize(model)
    folder = Path(tempfile.mkdtemp(prefix="wrapped-"))
    atexit.register(shutil.rmtree, folder)
    model.save_pretrained(folder)
    tensors = one.names(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    one.config(content)
    documents.write_json(folder / "config.json", content)
    documents.write_tokenizer(None, folder, 256)
    for file, settings in PROCESSORS.items():
        documents.write_json(folder / file, settings)
    return folder


@cache
def float8_checkpoint() -> Path:
    """Return a copy of the published Mistral 3 whose text matrices are FP8 with one scale each, as in Ministral 3."""
    folder = Path(tempfile.mkdtemp(prefix="wrapped-"))
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(checkpoint("mistral3, published"), folder, dirs_exist_ok=True)
    tensors = {name: one.astype(ml_dtypes.bfloat16) for name, one in load_file(folder / "model.safetensors").items()}
    for name in [name for name in tensors if ".layers." in name and "_proj." in name and "language_model" in name]:
        scale = np.float32(np.abs(tensors[name].astype(np.float32)).max() / 448)
        tensors[name] = (tensors[name].astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = np.asarray(scale, np.float32)
        tensors[name.removesuffix("weight") + "activation_scale"] = np.asarray(0.5, np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    section = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    content = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    documents.write_json(folder / "config.json", content | {"quantization_config": section})
    return folder


def float8_reference(folder: Path) -> Any:
    """Return transformers' model of an FP8 folder, dequantized to bfloat16, then computed in float32."""
    import torch
    from transformers import AutoModelForImageTextToText, FineGrainedFP8Config

    model = AutoModelForImageTextToText.from_pretrained(
        folder,
        attn_implementation="eager",
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    )
    return model.eval().float()


def reference(folder: Path) -> Any:
    """Return transformers' model of a folder in float32."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()


def others(folder: Path) -> dict[str, bytes]:
    """Return dtype, shape and bytes of every tensor that the text model does not train."""
    found: dict[str, bytes] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            found |= {name: _bytes(tensors.get_tensor(name)) for name in tensors.keys() if not _is_trained(name)}  # noqa: SIM118
    return found


def _is_trained(name: str) -> bool:
    is_text = "language_model" in name or name.startswith("lm_head")
    return is_text and name not in SHARED and not name.endswith("layer_scalar")


def _bytes(tensor: np.ndarray) -> bytes:
    return f"{tensor.dtype}{tensor.shape}".encode() + tensor.tobytes()
