from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from error_assertions import raises_error

from forerun.errors import UserError
from forerun.hub.chat import template
from forerun.hub.chat.template import chat_template, render, render_all

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
