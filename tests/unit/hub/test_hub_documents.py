"""JSON files of a checkpoint, and local folders as models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from error_assertions import raises_error
from safetensors.numpy import save_file

from forerun.errors import UserError
from forerun.hub.documents import MAX_DEPTH, read_json
from forerun.hub.snapshot import snapshot


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": {"b": 1, "c": 0, "b": 1}}', "duplicate key 'b'"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": ', "line 1"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": ' + b"[" * 100_000, "nested"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper"),
        (b'{"a": [' + b"[]," * 250_000 + b"[]]}", "more than 250000 values"),
        (b'{"a": "' + b"x" * (9 << 20) + b'"}', "more than the 8.00 MiB allowed"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_json(path)
    assert word in error.value.why
    assert str(path) in error.value.what


def test_json_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, 2.5, null, {"b": "ä"}], "c": true}', encoding="utf-8")
    assert read_json(path) == {"a": [1, 2.5, None, {"b": "ä"}], "c": True}


def test_a_config_has_its_own_limit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": "' + "x" * (2 << 20) + '"}')
    with raises_error("E-HUB-010"):
        snapshot(str(tmp_path), weights=False).config()


def test_a_local_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    found = snapshot(str(tmp_path), weights=False)
    assert (found.folder, found.revision, found.config()) == (tmp_path, None, {"model_type": "llama"})
    assert found.tokenizer_files == (tmp_path / "tokenizer.json",)
    assert found.json("generation_config.json") is None
    with raises_error("E-HUB-041"):
        snapshot(str(tmp_path))
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with snapshot(str(tmp_path)).open_weights() as weights:
        assert weights.view("a").tolist() == [1, 1, 1]


@pytest.mark.parametrize("ending", ["bin", "pt", "pth", "ckpt"])
def test_a_local_folder_with_pickle_only(tmp_path: Path, ending: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / f"model.{ending}").write_bytes(b"\x80\x04.")
    for weights in (True, False):
        with pytest.raises(UserError) as error:
            snapshot(str(tmp_path), weights=weights)
        assert "only as pickle" in error.value.what
        assert "safe_serialization=True" in error.value.fix


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with raises_error("E-HUB-032"):
        snapshot(str(tmp_path / "none"))
    with raises_error("E-HUB-034", "config.json"):
        snapshot(str(tmp_path))
    with raises_error("E-HUB-031"):
        snapshot(str(tmp_path), "main")
    with raises_error("E-HUB-030"):
        snapshot("qwen3-0.6b")
