"""How vLLM and Ollama serve an export: the command and the checks for vLLM, and the Modelfile for Ollama."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.hub.chat.template import chat_template
from forerun.hub.chat.turn_format import TurnFormat
from forerun.hub.documents import read_json
from forerun.models.families.wrapper import text_of
from forerun.models.quantization_config import QUANTIZATION

# The classes of vLLM's tables of text and multimodal models, among the families of forerun. transformers computes the
# others for vLLM.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "Exaone4ForCausalLM",
    "SeedOssForCausalLM",
    "CwmForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "Ernie4_5ForCausalLM",
    "GPT2LMHeadModel",
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
DEFAULT_LORA_RANK = 16  # vLLM rejects adapters of a higher rank unless --max-lora-rank is given


def serve_command(folder: Path) -> str:
    """Return the command that serves an exported folder, or adapters together with their base model."""
    if not (folder / "adapter_config.json").is_file():
        return shlex.join(["vllm", "serve", str(folder)])
    config = read_json(folder / "adapter_config.json")
    rank = int(config.get("r") or 0)
    words = ["vllm", "serve", str(config.get("base_model_name_or_path") or "BASE"), "--enable-lora"]
    words += ["--lora-modules", f"{folder.name}={folder}"]
    if rank > DEFAULT_LORA_RANK:
        words += ["--max-lora-rank", str(rank)]
    return shlex.join(words)


def checklist(folder: Path) -> list[tuple[str, str | None]]:
    """Return the checks of a folder with a complete model, each with its fault or None.

    The checks need no GPU: they read the files that vLLM reads at its start.
    """
    import tokenizers

    config = read_json(folder / "config.json")
    generation = _optional(folder / "generation_config.json")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    architectures = config.get("architectures") or []
    known = [name for name in architectures if name in ARCHITECTURES]
    ends = _ids(generation.get("eos_token_id", config.get("eos_token_id", text_of(config).get("eos_token_id"))))
    missing = [end for end in ends if inner.id_to_token(end) is None]
    method = (config.get(QUANTIZATION) or {}).get("quant_method")
    return [
        ("architecture", None if known else f"vLLM has no class for {architectures}: it computes it by transformers"),
        ("weights", None if any(folder.glob("*.safetensors")) else "the folder has no safetensors files"),
        ("end tokens", f"ids {missing} are not in the tokenizer" if missing else None if ends else "no end token"),
        ("chat template", None if chat_template(folder) is not None else "none: only completions, no chats"),
        ("quantization", None if method in (None, "compressed-tensors") else f"vLLM may not read {method}"),
        ("dtype", None if _dtype(config) != "float32" else "float32: vLLM converts it; --dtype float32 keeps it"),
    ]


def _dtype(config: dict[str, Any]) -> str | None:
    found = config.get("dtype") or config.get("torch_dtype")
    return found if isinstance(found, str) else None


def _ids(value: Any) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [one for one in listed if isinstance(one, int)]


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


# ---- The Modelfile with which Ollama loads a GGUF file: template, stop texts and sampling parameters ----


MODELFILE = "Modelfile"
# Keys of generation_config.json, and Ollama's names.
PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


def modelfile(file: str, form: TurnFormat | None, stops: Sequence[str], generation: Mapping[str, Any]) -> str:
    """Return the text of a Modelfile.

    Args:
        file: The name of the GGUF file, which is in the same folder.
        form: The chat format, or None to write the prompt unchanged.
        stops: The texts at which an answer ends.
        generation: The content of generation_config.json.
    """
    template = form.go_template() if form is not None else "{{ .Prompt }}"
    lines = [
        "# ollama create my-model -f Modelfile && ollama run my-model",
        f"FROM ./{file}",
        f'TEMPLATE """{template}"""',
        *(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops),
        *_sampling(generation),
    ]
    return "\n".join(lines) + "\n"


def _sampling(generation: Mapping[str, Any]) -> list[str]:
    if generation.get("do_sample") is False:
        return ["PARAMETER temperature 0"]
    return [
        f"PARAMETER {ours} {generation[key]}" for key, ours in PARAMETERS.items() if _is_number(generation.get(key))
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
