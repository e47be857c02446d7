"""What a model's name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import UserError
from forerun.hub.names import folder_path, is_folder, is_plugin, is_repository, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen/Qwen3-0.6B", "repository"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "repository"),
        ("a/b", "repository"),
        ("meta-llama/Llama-3.2-1B", "repository"),
        ("qwen3-0.6b", "size"),
        ("./x", "folder"),
        ("../x", "folder"),
        ("/models/x", "folder"),
        ("~/x", "folder"),
        (".", "folder"),
        ("mine:Model", "plugin"),
        ("package.models:Model", "plugin"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert is_repository(name) == (kind == "repository")
    assert is_folder(name) == (kind == "folder")
    assert is_plugin(name) == (kind == "plugin")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("a/b/c", "one slash"),
        ("a//b", "one slash"),
        ("Qwen/Qwen3@main", "no '@'"),
        ("http://example.invalid/a/b", "URL"),
        ("a/" + "b" * 100, "96 characters"),
        ("a/b c", "letters"),
        ("a/-b", "letters"),
        ("a/b--c", "letters"),
        ("a/b..c", "letters"),
        ("a/b.git", "letters"),
        ("a/b\0", "letters"),
    ],
)
def test_names_that_mean_nothing(name: str, word: str) -> None:
    assert not is_repository(name)
    with pytest.raises(UserError) as error:
        kind_of(name)
    assert word in error.value.why


def test_a_folder_that_is_here_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("acme/tiny").mkdir(parents=True)
    assert kind_of("acme/tiny") == "repository", "an empty folder is no model"
    Path("acme/tiny/config.json").write_text("{}")
    assert kind_of("acme/tiny") == "folder"
    assert folder_path("acme/tiny") == tmp_path / "acme/tiny"
    Path("qwen3-0.6b").mkdir()
    Path("qwen3-0.6b/config.json").write_text("{}")
    assert kind_of("qwen3-0.6b") == "size", "without a slash it is never a folder"
