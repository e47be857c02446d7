"""Settings of a job that change what a chat template writes: thinking, tools and ignored fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from error_assertions import assert_error

from forerun.config.schema import Data
from forerun.data.chat_template import chat_prompts, thinking_variables
from forerun.data.corpus import Corpus, Dialect, open_corpus, recipe_of
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import ByteTokenizer
from forerun.errors import UserError

SWITCHED = (
    "{{ bos_token }}{% if tools %}<{{ tools[0].name }}>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %}()"
    "{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TOOLS = [{"name": "weather"}]
SPECIAL = {"bos_token": "^"}


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(data: Data, template: str = SWITCHED) -> Corpus:
    return open_corpus(data, Dialect(ByteTokenizer(), template, SPECIAL), sequence=96)


def texts(corpus: Corpus) -> list[tuple[str, str]]:
    """Return the text and the text with loss of each row."""
    rows = corpus.rows.take(range(len(corpus.rows)))
    found = []
    for tokens, targets, weights in zip(rows["tokens"], rows["targets"], rows["weights"], strict=True):
        learned = targets[(weights > 0) & (targets < 256)]
        found.append((bytes(tokens[tokens < 256].tolist()).decode().rstrip("\0"), bytes(learned.tolist()).decode()))
    return found


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_is_the_variable_that_the_template_reads(name: str, thinking: bool) -> None:
    template = SWITCHED.replace("enable_thinking", name)
    assert thinking_variables(thinking, template, SPECIAL) == {name: thinking}
    assert thinking_variables(None, template, SPECIAL) == {}


def test_a_template_without_a_switch_is_reported() -> None:
    plain = SWITCHED.replace("enable_thinking is false", "messages[0].enable_thinking")
    with pytest.raises(UserError) as raised:
        thinking_variables(False, plain, SPECIAL)
    assert_error(raised.value, "E-DATA-165", what="data.thinking=false", fix="data.chat_template=FILE")
    with pytest.raises(UserError) as raised:
        thinking_variables(True, plain + "{# reasoning_effort #}", SPECIAL)
    assert_error(raised.value, "E-DATA-165", why="reasoning_effort")


def test_thinking_changes_the_prompt_and_the_key_of_the_tokens(tmp_path: Path) -> None:
    source = open_source(Data(path=jsonl(tmp_path / "a.jsonl", {"messages": CHAT})))
    keys, prompts = set(), []
    for thinking in (None, True, False):
        data = Data(path=str(tmp_path / "a.jsonl"), thinking=thinking)
        recipe = recipe_of(source, data, Dialect(ByteTokenizer(), SWITCHED, SPECIAL))
        keys.add(recipe.key(source))
        assert recipe.template is not None
        (ids,) = chat_prompts([CHAT[:1]], recipe.template, recipe.special, ByteTokenizer())
        prompts.append(bytes(ids).decode())
    assert len(keys) == 3
    assert prompts == ["^user:Hi;assistant:", "^user:Hi;assistant:", "^user:Hi;assistant:()"]


def test_tools_of_a_row_reach_the_template_as_a_list_or_as_json(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": CHAT, "tools": TOOLS},
        {"messages": CHAT, "tools": json.dumps(TOOLS)},
        {"messages": CHAT, "tools": None},
        {"messages": CHAT, "tools": ""},
        {"messages": CHAT},
    ]
    corpus = opened(Data(path=jsonl(tmp_path / "a.jsonl", *rows), packing="whole"))
    assert corpus.parts[0].source.unused == []
    joined = "".join(text for text, _ in texts(corpus))
    assert joined.count("^<weather>user:Hi;assistant:Hello;") == 2
    assert joined.count("^user:Hi;assistant:Hello;") == 3
    assert "".join(learned for _, learned in texts(corpus)) == "Hello;" * 5


def test_tools_that_are_not_a_list_of_objects_are_a_bad_row(tmp_path: Path) -> None:
    for tools in ("{", "3", 3, ["x"], {"name": "weather"}):
        with pytest.raises(UserError) as raised:
            opened(Data(path=jsonl(tmp_path / "a.jsonl", {"messages": CHAT, "tools": tools})))
        assert_error(raised.value, "E-DATA-071", what="tools")


def test_tools_that_the_template_does_not_write_are_an_error_unless_ignored(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHAT, "tools": TOOLS})
    plain = SWITCHED.partition("{% endif %}")[2]
    with pytest.raises(UserError) as raised:
        opened(Data(path=path), plain)
    assert_error(raised.value, "E-HUB-060", fix="data.ignored_fields=[tools]")
    assert texts(opened(Data(path=path, ignored_fields=["tools"]), plain)) == [("user:Hi;assistant:Hello;", "Hello;")]


def test_an_ignored_field_is_not_given_to_the_template(tmp_path: Path) -> None:
    thoughtful = [CHAT[0], CHAT[1] | {"reasoning_content": "hm"}]
    path = jsonl(tmp_path / "a.jsonl", {"messages": thoughtful})
    with pytest.raises(UserError) as raised:
        opened(Data(path=path))
    assert_error(raised.value, "E-HUB-060", what="'reasoning_content' of message 2")
    ((text, _),) = texts(opened(Data(path=path, ignored_fields=["reasoning_content"])))
    assert text == "^user:Hi;assistant:Hello;"


def test_settings_of_a_template_that_is_not_used_are_noted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    corpus = opened(Data(path=str(tmp_path / "a.txt"), thinking=False, ignored_fields=["tools"]))
    assert [word for word in ("data.thinking", "data.ignored_fields") if word in " ".join(corpus.warnings)] == [
        "data.thinking",
        "data.ignored_fields",
    ]
