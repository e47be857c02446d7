from __future__ import annotations

from typing import Any

import pytest

from forerun.errors import Problem, UserError
from forerun.hub.chat.template import CHATML, RenderedConversation, render_conversations

END = "<|im_end|>"


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CHAT = [said("user", "one"), said("assistant", "two"), said("user", "two"), said("assistant", "two three")]


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
    assert "depends on its generation marks" in found.why


def test_space_behind_the_end_of_a_turn_is_not_said_but_an_end_that_is_space_is() -> None:
    template = "{% for m in messages %}{{ m.role + ':' + m.content + end }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    assert answers(template, CHAT, end=f"{END}\n\n") == [f"two{END}", f"two three{END}"]
    assert answers(template, CHAT, end="\n") == ["two\n", "two three\n"]


def test_each_conversation_has_its_own_fate() -> None:
    template = "{{ messages[0].content + '' }}{% if messages[0].role == 'x' %}{{ raise_exception('no x') }}{% endif %}"
    chats = [CHAT[:1], [said("x", "y")], [said("user", 7)], CHAT[:1]]
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
    assert answers(CHATML, [said("user", odd), said("assistant", odd)]) == [odd + END]
