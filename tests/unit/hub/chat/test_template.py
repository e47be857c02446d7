from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from error_assertions import raises_error

from forerun.errors import Problem, UserError
from forerun.hub.chat import template
from forerun.hub.chat.template import (
    CHATML,
    RenderedConversation,
    chat_template,
    render,
    render_all,
    render_conversations,
)

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SHORT = [{"role": "user", "content": "Is 1 < 2 & “3” > 2?"}]
LONG = [
    {"role": "system", "content": "  Be brief.\n"},
    *SHORT,
    {"role": "assistant", "content": "Yes.\n\n{{ not_a_template }}"},
    {"role": "user", "content": " Grüße "},
]
TEMPLATES = {
    "chatml": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system_message = messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n"
    "{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{{- system_message }}{{- '<|eot_id|>' }}\n"
    "{%- for message in messages %}\n    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}\n"
    "    {{- message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n",
    "qwen": "{%- if tools %}\n    {{- '# Tools' }}{{ tools | tojson }}\n{%- endif %}\n"
    "{%- set ns = namespace(last=messages|length - 1, seen=false) %}\n"
    "{%- for message in messages[::-1] %}\n    {%- if not ns.seen and message.role == 'user' %}\n"
    "        {%- set ns.seen = true %}\n        {%- set ns.last = loop.revindex0 %}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- for message in messages %}\n    {%- if message.role == 'tool' %}{% continue %}{% endif %}\n"
    "    {{- '<|im_start|>' + message.role }}{% if loop.index0 == ns.last %}!{% endif %}\n"
    "    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | tojson }}{% endgeneration %}\n"
    "    {%- else %}{{ message.content }}{% endif %}\n    {{- '<|im_end|>\n' }}\n{%- endfor %}\n"
    "  {% if add_generation_prompt %}\n{{- '<|im_start|>assistant\n' }}\n  {% endif %}\n",
    "mistral": "{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}"
    "{% endif %}{{ bos_token }}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}",
}


@pytest.mark.torch
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str, messages: list[dict[str, str]], prompt: bool) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    expected = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompt
    )
    assert len(expected) > 20
    assert render(TEMPLATES[name], messages, special=SPECIAL, prompt=prompt) == expected


def test_known_texts() -> None:
    start = "<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n<|im_start|>user\n"
    assert render(TEMPLATES["chatml"], SHORT, special={}) == (
        start + "Is 1 < 2 & “3” > 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render("{{ strftime_now('%Y') }}", SHORT, special={}) == time.strftime("%Y")
    assert render_all("{{ messages | length }}{{ bos_token }}", [SHORT, LONG], special=SPECIAL) == ["1<s>", "4<s>"]


def test_a_refusal_of_the_template_is_told_in_its_words() -> None:
    with raises_error("E-HUB-003", "2") as caught:
        render_all(TEMPLATES["mistral"], [SHORT, SHORT * 2], special=SPECIAL)
    assert "must alternate" in caught.value.why


HOSTILE = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "attr filter": "{{ (messages | attr('__class__')).mro }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "dunder in a namespace": "{% set n = namespace(__class__=1) %}{{ n.__class__ }}",
    "change of the messages": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "long range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "huge number": "{{ (10**99999)**99999 }}",
    "huge string": "{{ 'x' * 10**10 }}",
    "padding": "{{ '%1000000000d' % 1 }}{{ 'a' | center(10**10) }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "much text": "{% for i in range(99999) %}{{ 'y' * 100 }}{% endfor %}",
    "syntax": "{% for",
    "undefined": "{{ nothing.at.all }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_as_a_users_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "CPU_SECONDS", 1)
    with pytest.raises(UserError, match=r"E-HUB-00[57]"):
        render(HOSTILE[name], SHORT, special={})


@pytest.mark.timing
def test_a_template_that_only_waits_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(template, "WALL_SECONDS", 0.2)
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time\ntime.sleep(100)\n")
    monkeypatch.setattr(template.child, "__file__", str(sleeper))
    with raises_error("E-HUB-007"):
        render("", SHORT, special={})


@pytest.mark.timing
def test_a_slow_start_is_not_the_templates_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where no compiled modules may be kept, on a slow core."""
    slow = tmp_path / "slow.py"
    burn = "import runpy, time\nwhile time.process_time() < 1.1: pass\n"
    slow.write_text(f"{burn}runpy.run_path({template.child.__file__!r}, run_name='__main__')\n")
    monkeypatch.setattr(template, "CPU_SECONDS", 1)
    monkeypatch.setattr(template.child, "__file__", str(slow))
    assert render("{{ messages | length }}", SHORT, special={}) == "1"


def test_the_child_sees_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    spy = tmp_path / "spy.py"
    spy.write_text("import json, os\nprint(json.dumps({'texts': [json.dumps(sorted(os.environ))]}))\n")
    monkeypatch.setattr(template.child, "__file__", str(spy))
    assert set(json.loads(render("", SHORT, special={}))) <= {"TZ", "LD_LIBRARY_PATH", "LC_CTYPE"}


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert chat_template(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>"})
    assert chat_template(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"chat_template": "one"})
    assert chat_template(tmp_path) == "one"
    several = [{"name": "rag", "template": "two"}, {"name": "default", "template": "three"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": several})
    assert chat_template(tmp_path) == "three"
    write(tmp_path, "chat_template.jinja", "four ü")
    assert chat_template(tmp_path) == "four ü"


@pytest.mark.parametrize("wrong", [7, ["x"], [{"name": "rag", "template": "two"}], [{"name": "default"}]], ids=str)
def test_a_template_that_is_none(wrong: Any, tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": wrong})
    with raises_error("E-HUB-001", "'default'"):
        chat_template(tmp_path)


def test_template_files_that_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(b"x" * (template.MAX_TEMPLATE_BYTES + 1))
    with raises_error("E-HUB-008"):
        chat_template(tmp_path)
    file.write_bytes(b"\xff")
    with raises_error("E-HUB-009"):
        chat_template(tmp_path)
    file.unlink()
    os.symlink("/etc/hostname", file)
    with raises_error("E-HUB-011"):
        chat_template(tmp_path)


END = "<|im_end|>"


def message_of(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CHAT = [
    message_of("user", "one"),
    message_of("assistant", "two"),
    message_of("user", "two"),
    message_of("assistant", "two three"),
]


def answers(template: str, chat: list[dict[str, Any]], **special: str) -> list[str]:
    (found,) = render_conversations(template, [chat], special=special, ends=[END])
    assert isinstance(found, RenderedConversation), found
    return [found.text[start:stop] for start, stop in found.spans]


def test_chatml() -> None:
    (found,) = render_conversations(CHATML, [CHAT[:2]], special={}, ends=[END])
    assert isinstance(found, RenderedConversation)
    assert found.text == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
    assert answers(CHATML, CHAT) == ["two<|im_end|>", "two three<|im_end|>"]


MARKS = {
    "in a macro": "{% macro say(m) %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ say(m) }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "kept for later": "{% for m in messages %}{% set text %}{% if m.role == 'assistant' %}<{% generation %}"
    "{{ m.content }}{% endgeneration %}>{% else %}{{ m.content }}{% endif %}{% endset %}{{ text }}{% endfor %}",
    "nested": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% generation %}{{ m.content[:1] }}"
    "{% endgeneration %}{{ m.content[1:] }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "with space control": "{% for m in messages %}\n  {%- if m.role == 'assistant' %}  \n  {%- generation %}\n"
    "{{ m.content }}\n  {%- endgeneration %}\n  ;\n  {% else %}{{ m.content }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", MARKS)
def test_marks_are_exact_wherever_their_text_is_made(name: str) -> None:
    assert answers(MARKS[name], CHAT) == ["two", "two three"]


def test_a_filter_over_the_marks_that_changes_the_text_is_told() -> None:
    template = "{% macro say() %}{% generation %}a{% endgeneration %}{% endmacro %}{{ say() | length }}"
    (found,) = render_conversations(template, [CHAT], special={}, ends=[])
    assert isinstance(found, Problem)
    assert "generation marks" in found.why


def test_space_behind_the_end_of_a_turn_is_not_said_but_an_end_that_is_space_is() -> None:
    template = "{% for m in messages %}{{ m.role + ':' + m.content + end }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    assert answers(template, CHAT, end=f"{END}\n\n") == [f"two{END}", f"two three{END}"]
    assert answers(template, CHAT, end="\n") == ["two\n", "two three\n"]


def test_each_conversation_has_its_own_fate() -> None:
    template = "{{ messages[0].content + '' }}{% if messages[0].role == 'x' %}{{ raise_exception('no x') }}{% endif %}"
    chats = [CHAT[:1], [message_of("x", "y")], [message_of("user", 7)], CHAT[:1]]
    first, refused, wrong, last = render_conversations(template, chats, special={}, ends=[])
    assert first == last == RenderedConversation("one", ())
    assert isinstance(refused, Problem)
    assert refused.why == "it says: no x"
    assert isinstance(wrong, Problem)
    assert "TypeError" in wrong.why


@pytest.mark.parametrize(
    "template", ["{% for", "{{ 'x' * 10**10 }}", "{% for i in range(99999) %}{{ 'y' * 999 }}{% endfor %}"]
)
def test_a_template_that_is_wrong_for_all_ends_it(template: str) -> None:
    with pytest.raises(UserError, match=r"E-HUB-00[57]"):
        render_conversations(template, [CHAT], special={}, ends=[])


def test_the_day_does_not_matter() -> None:
    assert render_conversations("{{ strftime_now('%d %b %Y') }}", [CHAT[:1]], special={}, ends=[]) == [
        RenderedConversation("26 Jul 2024", ())
    ]


def test_characters_that_look_like_our_marks_are_text() -> None:
    odd = "\U00100000two\U00100001"
    assert answers(CHATML, [message_of("user", odd), message_of("assistant", odd)]) == [odd + END]
