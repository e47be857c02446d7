"""The Modelfile of Ollama."""

from __future__ import annotations

import json

from forerun.hub.chat.turn_format import TurnFormat
from forerun.weights_io.serving import modelfile


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


def test_a_template_of_a_checkpoint_adds_no_instruction() -> None:
    """Anyone can write the texts of a chat template: quotation marks, lines and braces must not end the TEMPLATE."""
    hostile = '"""\nFROM /etc/passwd\nPARAMETER stop x {{ .System }} }} \\"""'
    form = TurnFormat(hostile, hostile, hostile, hostile, hostile, hostile)
    text = modelfile("small.gguf", form, [f"{hostile}\nADAPTER ./x"], {})
    (template, rest) = text.split('TEMPLATE """')[1].split('"""\n', 1)
    assert "\n" not in template
    assert rest.count("\n") == 1
    assert [line.split(" ")[0] for line in text.splitlines()] == ["#", "FROM", "TEMPLATE", "PARAMETER"]
    # Each text is one string of the template language, whose escapes are those of JSON.
    assert json.loads(template[template.index('{{ "\\"') + 3 :].split(" }}{{ $.System")[0]) == hostile


def test_sampling_parameters_that_are_no_numbers_are_omitted() -> None:
    generation = {"temperature": float("nan"), "top_p": True, "top_k": "5\nFROM x", "min_p": float("inf")}
    assert "PARAMETER" not in modelfile("small.gguf", None, [], generation)
