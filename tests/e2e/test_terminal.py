"""Hostile files and models: the commands print no control sequence but their own colours, to a pipe and a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[8m\x9b2J\u202e"
OURS = re.compile(rb"\x1b\[(?:[0-9;]*m|\?25[lh]|[12]K|1A|K)|\r")
CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]")
VOCAB, EMBED = 64, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "model").mkdir()
    write_model(folder / "model")
    rows = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": rows}) + "\n")
    (folder / "rows.csv").write_text(f"{ESCAPES}col,b\nx,y\n")
    (folder / "keys.jsonl").write_text(json.dumps({ESCAPES: 1}) + "\n")
    (folder / "names").mkdir()
    (folder / "names" / f"a{ESCAPES}\n.jsonl").write_text('{"x": 1}\n')
    text = (f"{ESCAPES} some text " * 100) + "\n"
    (folder / f"good{ESCAPES}.txt").write_text(text)
    return folder


def write_model(folder: Path) -> None:
    """A model that can only say escape sequences: every token of its vocabulary is one."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = {"hello": 0, **{f"{ESCAPES}{n}": n for n in range(1, VOCAB - 1)}, "<eos>": VOCAB - 1}
    end = {"id": VOCAB - 1, "content": "<eos>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "hello"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{{ raise_exception('" + ESCAPES + "all good') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    draw = np.random.default_rng(0).standard_normal
    shapes = {f"self_attn.{name}_proj": (EMBED, EMBED) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (64, EMBED), "mlp.up_proj": (64, EMBED), "mlp.down_proj": (EMBED, 64)}
    weights = {f"model.layers.0.{name}.weight": draw(shape).astype("float32") for name, shape in shapes.items()}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    weights |= {f"{name}.weight": np.ones(EMBED, "float32") for name in norms}
    embed = draw((VOCAB, EMBED)).astype("float32")
    # The layer adds nothing, so a token's own row gives the largest logit, and for hello the row that is twice its own.
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"][:] = 0.0
    embed /= np.linalg.norm(embed, axis=1, keepdims=True)
    embed[0] = embed[1] / 2
    save_file({"model.embed_tokens.weight": embed, **weights}, folder / "model.safetensors")


def write_job(folder: Path, **more: object) -> Path:
    job = {"model": {"layers": 1, "embed": 32, "heads": 2}, "sequence": 64, "batch": 4, "steps": 2, **more}
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def settings(folder: Path, shell: dict[str, str]) -> dict[str, str]:
    return {**shell, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}


def piped(folder: Path, shell: dict[str, str], *arguments: str) -> tuple[int, bytes]:
    ran = subprocess.run(
        ["forerun", *arguments], cwd=folder, env=settings(folder, shell), capture_output=True, check=False
    )
    return ran.returncode, ran.stdout + ran.stderr


def on_terminal(folder: Path, shell: dict[str, str], *arguments: str) -> tuple[int, bytes]:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        ["forerun", *arguments],
        cwd=folder,
        env=settings(folder, shell) | {"TERM": "xterm-256color", "COLUMNS": "120"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            block = os.read(ours, 1 << 16)
        except OSError:  # Linux: the last process that had the terminal is gone
            break
        if not block:
            break
        text += block
    os.close(ours)
    return child.wait(), text


@pytest.mark.parametrize(
    ("command", "job"),
    [
        pytest.param("data", {"model": "./model", "data": "chat.jsonl"}, id="template"),
        pytest.param("data", {"data": "rows.csv"}, id="csv header"),
        pytest.param("data", {"data": "keys.jsonl"}, id="jsonl key"),
        pytest.param("data", {"data": "names"}, id="file name"),
        pytest.param("check", {"data": "keys.jsonl", ESCAPES: 1}, id="yaml key"),
        pytest.param("check", {"data": "keys.jsonl", "name": ESCAPES}, id="yaml value"),
        pytest.param("--debug", {"data": f"{ESCAPES}.txt"}, id="traceback"),
    ],
)
def test_an_error_shows_hostile_text_as_escapes(
    command: str, job: dict[str, object], folder: Path, shell: dict[str, str]
) -> None:
    write_job(folder, **job)
    code, text = piped(folder, shell, *([command, "data"] if command == "--debug" else [command]), "job.yaml")
    assert code == 2, text
    assert b"x1b" in text
    assert b"owned" in text
    assert not CONTROL.findall(text), ascii(text)


@pytest.mark.parametrize(
    ("arguments", "job"),
    [
        pytest.param(["check"], {"data": f"good{ESCAPES}.txt"}, id="check"),
        pytest.param(["data"], {"data": {"mixture": {ESCAPES: {"path": f"good{ESCAPES}.txt"}}}}, id="data"),
        pytest.param(["data"], {"data": "rows.csv"}, id="error"),
        pytest.param(["generate", "model", "hello", "--max-tokens", "4", "--temperature", "0"], None, id="generate"),
    ],
)
def test_a_terminal_gets_no_sequence_but_our_own(
    arguments: list[str], job: dict[str, object] | None, folder: Path, shell: dict[str, str]
) -> None:
    if job is not None:
        write_job(folder, **job)
        arguments = [*arguments, "job.yaml"]
    code, text = on_terminal(folder, shell, *arguments)
    assert code == (2 if job == {"data": "rows.csv"} else 0), text
    assert b"owned" in text
    left = OURS.sub(b"", text)
    assert not CONTROL.findall(left), ascii(left)
    assert not re.search(rb"\x1b\[[0-9;]*\b8m|\x1b\[2J|\x1b\]|\x07", text), ascii(text)
