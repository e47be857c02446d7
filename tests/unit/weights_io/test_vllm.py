"""The checks of a folder for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.weights_io import documents
from forerun.weights_io.serving import checklist, serve_command


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
