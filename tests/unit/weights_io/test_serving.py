"""The checks of a folder for vLLM. The Modelfile of Ollama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.hub.chat.turn_format import TurnFormat
from forerun.weights_io import documents
from forerun.weights_io.serving import checklist, modelfile, serve_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents.write_tokenizer(None, tmp_path, 256)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    write(tmp_path, "config.json", architectures=["Qwen3ForCausalLM"], eos_token_id=256, dtype="bfloat16")
    return tmp_path


def write(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def faults(folder: Path) -> list[str]:
    return [name for name, fault in checklist(folder) if fault is not None]


def test_a_good_folder_has_no_faults(folder: Path) -> None:
    assert faults(folder) == []
    assert serve_command(folder) == f"vllm serve {folder}"


def test_every_fault_is_found(folder: Path) -> None:
    write(folder, "config.json", architectures=["OwnModel"], dtype="float32", quantization_config={"quant_method": "x"})
    write(folder, "generation_config.json", eos_token_id=[256, 999])
    (folder / "chat_template.jinja").unlink()
    (folder / "model.safetensors").unlink()
    assert faults(folder) == ["architecture", "weights", "end tokens", "chat template", "quantization", "dtype"]
    write(folder, "generation_config.json")
    assert "end tokens" in faults(folder), "none at all"


def test_adapters_are_served_with_their_base(tmp_path: Path) -> None:
    write(tmp_path, "adapter_config.json", base_model_name_or_path="owner/base", r=64)
    wanted = f"vllm serve owner/base --enable-lora --lora-modules {tmp_path.name}={tmp_path} --max-lora-rank 64"
    assert serve_command(tmp_path) == wanted


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
    assert '"""{{ .Prompt }}"""' in text
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
