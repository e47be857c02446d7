"""The Modelfile of Ollama."""

from __future__ import annotations

from forerun.hub.chat.turn_format import TurnFormat
from forerun.weights_io.modelfile import modelfile


def test_template_stops_and_parameters() -> None:
    form = TurnFormat("<u>", None, "", "<a>", "<u>", "<a>")
    generation = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "eos_token_id": [2, 0], "top_k": None}
    lines = modelfile("small-Q8_0.gguf", form, ["<|im_end|>", 'a"b'], generation).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "FROM ./small-Q8_0.gguf",
        f'TEMPLATE """{form.go_template()}"""',
        'PARAMETER stop "<|im_end|>"',
        'PARAMETER stop "a\\"b"',
        "PARAMETER temperature 0.6",
        "PARAMETER top_p 0.9",
        "PARAMETER repeat_penalty 1.1",
    ]


def test_a_model_without_a_chat_format_gets_the_prompt() -> None:
    text = modelfile("small.gguf", None, [], {"do_sample": False, "temperature": 0.6})
    assert 'TEMPLATE """{{ .Prompt }}"""' in text
    assert text.endswith("PARAMETER temperature 0\n")
