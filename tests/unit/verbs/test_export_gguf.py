"""GGUF files of runs: the template and the end of a turn in the file and in the Modelfile, and what is rejected."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from error_assertions import assert_error

from forerun.config.load import load
from forerun.errors import UserError
from forerun.hub.chat.template import CHATML
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.verbs.export.export import export
from forerun.verbs.export.result import Export

gguf = pytest.importorskip("gguf")
sys.path.append(str(Path(__file__).parent))
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
MODEL = "{layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 64, vocab: 384}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from scratch with a tokenizer of its own and a chat template, and one with adapters."""
    sys.path.append(str(Path(__file__).parents[1] / "data" / "tokens"))
    from small_tokenizers import byte_level, saved

    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = saved(byte_level(), folder)
    row = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the quick fox"}]}
    (folder / "chat.jsonl").write_text(json.dumps(row) + "\n")
    for name, more in (("plain", []), ("adapted", ["lora.rank=2"])):
        (folder / f"{name}.yaml").write_text(
            f"name: {name}\nmodel: {MODEL}\nsteps: 2\nsequence: 64\nbatch: 1\ndevice: cpu\ndevices: 1\n"
            f"data: {{path: chat.jsonl, tokenizer: {tokenizer}, chat_template: chatml}}\nsample: {{tokens: 0}}\n"
            f"optimizer: {{lr: 1.0e-2, warmup: 0}}\nruns: {folder / 'runs'}\n"
        )
        with make_display(io.StringIO()) as display:
            train(load(folder / f"{name}.yaml", more).job, display)
    return folder


@pytest.fixture(scope="module")
def exported(place: Path) -> Export:
    return export(str(place / "runs/plain"), str(place / "out"), gguf="q8_0")


def fields(done: Export) -> dict[str, Any]:
    assert done.gguf is not None
    return {key: field.contents() for key, field in gguf.GGUFReader(done.gguf.path).fields.items()}


def test_the_file_has_the_weights_and_the_chat_format_of_the_run(exported: Export) -> None:
    from safetensors.numpy import load_file

    assert exported.gguf is not None
    assert exported.gguf.path == exported.folder / "plain-Q8_0.gguf"
    found = fields(exported)
    assert (found["general.architecture"], found["general.name"]) == ("llama", "plain")
    assert found["llama.context_length"] == 64, "config.json has none, so it is the length of training"
    assert found["tokenizer.chat_template"] == CHATML
    assert found["tokenizer.ggml.tokens"][found["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    named = load_file(exported.folder / "model.safetensors")
    for tensor in gguf.GGUFReader(exported.gguf.path).tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            value = named["model.layers.1.mlp.down_proj.weight"]
            stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.abs(stored - value).max() <= np.abs(value).max() / 127 * 0.6


def test_a_conversation_rendered_from_the_file(exported: Export) -> None:
    template = str(fields(exported)["tokenizer.chat_template"])
    template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    messages = [{"role": "user", "content": "hello"}]
    found = jinja2.Environment().from_string(template).render(messages=messages, add_generation_prompt=True)
    assert found == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_the_modelfile(exported: Export) -> None:
    lines = (exported.folder / "Modelfile").read_text().splitlines()
    assert "FROM ./plain-Q8_0.gguf" in lines
    assert 'PARAMETER stop "<|im_end|>"' in lines
    (template,) = (line for line in lines if line.startswith("TEMPLATE"))
    assert '"<|im_start|>user\\n"' in template


def test_the_command_prints_the_file_and_the_command_of_vllm(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forerun.cli.main import main

    assert main(["export", str(place / "runs/plain"), "--to", str(tmp_path / "out"), "--gguf", "f16"]) == 0
    out = capsys.readouterr().out
    assert "plain-F16.gguf" in out
    assert f"vllm serve {tmp_path / 'out'}" in out


def test_rejected_before_anything_is_written(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        export(str(place / "runs/adapted"), str(tmp_path / "out"), gguf="q8_0")
    assert_error(raised.value, "E-COMMAND-050", fix="--merge")
    with pytest.raises(UserError) as raised:
        export(str(place / "runs/plain"), str(tmp_path / "out"), gguf="q3_k_s")
    assert_error(raised.value, "E-COMMAND-051", what="q3_k_s", fix="llama-quantize")
    assert not list(tmp_path.iterdir())


def test_merged_adapters(place: Path, tmp_path: Path) -> None:
    done = export(str(place / "runs/adapted"), str(tmp_path / "out"), merge=True, gguf="f32")
    assert done.gguf is not None
    assert done.gguf.path.is_file()
