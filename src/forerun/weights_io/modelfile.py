"""The Modelfile with which Ollama loads a GGUF file: template, stop texts and sampling parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.hub.chat.turn_format import TurnFormat

NAME = "Modelfile"
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
