"""Chat templates as Go templates: a small interpreter of Go's actions renders what jinja2 renders."""

from __future__ import annotations

import json
import re
from typing import Any

import jinja2
import pytest

from forerun.hub.chat.template import CHATML
from forerun.hub.chat.turn_format import TurnFormat, turn_format

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA3 = (  # a system message is the beginning of the first question
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set prefix = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + "
    "(prefix if loop.first else '') }}{{ m['content'] | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are \"kind\".<|im_end|>\n' }}{% endif %}"
    + CHATML
)
FORMATS = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "default system": DEFAULT_SYSTEM,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS = [
    [("user", "Hello?")],
    [("user", "Hello?"), ("assistant", "Yes, {{ .Content }}."), ("user", 'What is "this" \\ that?\n\nSay.')],
    [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"), ("user", "5")],
]


def messages_of(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def rendered(template: str, messages: list[dict[str, str]]) -> str:
    """By jinja2 alone, with the settings of transformers."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = re.sub(r"\{%-? (end)?generation -?%\}", "", template)  # marks of transformers, which write nothing
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **SPECIAL)


class GoTemplate:
    """An interpreter of the actions that the templates use: strings, fields, variables, if, else, range, eq and ne."""

    def __init__(self, source: str) -> None:
        self.items = re.findall(r"\{\{ (\"(?:[^\"\\]|\\.)*\"|[^\"{}]*(?:\"[^\"]*\")?[^\"{}]*?) \}\}|([^{]+)", source)
        assert (
            "".join(f"{{{{ {action} }}}}{text}" for action, text in self.items if action or text).replace("{{  }}", "")
            == source
        ), "the interpreter reads all of the template"
        self.variables: dict[str, Any] = {}

    def render(self, data: dict[str, Any]) -> str:
        self.root = data
        text, end = self._run(0, data)
        assert end == len(self.items)
        return text

    def _run(self, at: int, dot: Any, live: bool = True) -> tuple[str, int]:
        """Render until `else` or `end`."""
        parts = []
        while at < len(self.items):
            action, text = self.items[at]
            if text:
                parts.append(text)
            elif action == "end" or action.startswith("else"):
                break
            elif action.startswith("if "):
                found, at = self._branches(at, dot, live)
                parts.append(found)
            elif action.startswith("range "):
                body, turns = at + 1, self._value(action[6:], dot) if live else []
                _, at = self._run(body, dot, live=False)
                parts += [self._run(body, one)[0] for one in turns]
            elif found := re.fullmatch(r"(\$\w+) :?= (.*)", action):
                if live:
                    self.variables[found[1]] = self._value(found[2], dot)
            elif live:
                parts.append(self._value(action, dot))
            at += 1
        return "".join(parts), at

    def _branches(self, at: int, dot: Any, live: bool) -> tuple[str, int]:
        chosen, taken = "", False
        while True:
            action = self.items[at][0]
            condition = action.removeprefix("else").strip().removeprefix("if ")
            holds = live and not taken and (action == "else" or bool(self._value(condition, dot)))
            text, at = self._run(at + 1, dot, live=holds)
            chosen, taken = (text, True) if holds else (chosen, taken)
            if self.items[at][0] == "end":
                return chosen, at

    def _value(self, term: str, dot: Any) -> Any:
        if term.startswith(("eq ", "ne ")):
            one, other = (self._value(part, dot) for part in term[3:].split(" "))
            return (one == other) == term.startswith("eq")
        if term.startswith('"'):
            return json.loads(term)
        if term in ("true", "false"):
            return term == "true"
        if term.startswith("$."):
            return self.root[term[2:]]
        return self.variables[term] if term.startswith("$") else dot[term[1:]]


def by_go(form: TurnFormat, messages: list[dict[str, str]]) -> str:
    """As Ollama gives messages to a template."""
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    listed = [{"Role": m["role"], "Content": m["content"]} for m in messages]
    return GoTemplate(form.go_template()).render({"System": system, "Messages": listed})


@pytest.mark.parametrize("name", FORMATS)
def test_a_go_template_renders_what_jinja_renders(name: str) -> None:
    form = turn_format(FORMATS[name], SPECIAL)
    assert form is not None
    for chat in CHATS:
        messages = messages_of(chat)
        assert by_go(form, messages) == rendered(FORMATS[name], messages)
        if name != "mistral":  # it rejects a system message
            both = [{"role": "system", "content": "Be brief."}, *messages]
            assert by_go(form, both) == rendered(FORMATS[name], both)
    assert (form.system_start is None) == (name == "mistral")


def test_the_runtime_adds_the_begin_token() -> None:
    form = turn_format(LLAMA3, SPECIAL)
    assert form is not None
    messages = messages_of(CHATS[1])
    assert "<s>" + by_go(form.without_start("<s>"), messages) == rendered(LLAMA3, messages)


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("content", "content.split('</think>')[-1]", 1),
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.role + m.content * 2 }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ loop.index ~ m.content }}{% endfor %}",
    ],
    ids=["thoughts", "last only", "twice", "refuses", "numbers"],
)
def test_other_templates_have_no_turn_format(template: str) -> None:
    assert turn_format(template, SPECIAL) is None
