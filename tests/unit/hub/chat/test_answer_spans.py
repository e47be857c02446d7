"""Answers of templates without generation marks whose prefixes do not fit, rendered in this process."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.hub.chat.render_process import spoken

ENDS = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|call|>", "<|end|>", "<|return|>"]
USER = {"role": "user", "content": "one"}
ANSWER = {"role": "assistant", "content": "two"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
RESULT = {"role": "tool", "content": "three"}


def said(template: str, chat: list[dict[str, Any]], *, checks: bool = True, **variables: Any) -> Any:
    """Return the texts of the answers, or the fault of the conversation."""
    request = {
        "template": template,
        "conversations": [chat],
        "tools": [None],
        "variables": variables | {"add_generation_prompt": False},
        "ends": ENDS,
        "answers": True,
        "checks": checks,
        "date": "2024-07-26",
        "output_characters": 100_000,
    }
    (found,) = spoken(request)["spoken"]
    return [found["text"][start:stop] for start, stop in found["spans"]] if "text" in found else found


# A block of thoughts is in the generation prompt and in the last turn only.
PROMPTED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({{ c.function.arguments | tojson }})</call>"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
)


def test_an_earlier_answer_without_the_block_of_the_generation_prompt() -> None:
    assert said(PROMPTED, [USER, ANSWER, USER, ANSWER]) == ["two<|im_end|>", "two<|im_end|>"]


def test_calls_without_any_text_of_their_own() -> None:
    assert said(PROMPTED, [USER, CALL, RESULT, ANSWER]) == ['<call>add({"a": 2})</call><|im_end|>', "two<|im_end|>"]


def test_an_answer_that_begins_like_the_generation_prompt_is_learned_completely() -> None:
    tagged = {"role": "assistant", "content": "<think>x"}
    assert said(PROMPTED, [USER, tagged, USER, ANSWER]) == ["<think>x<|im_end|>", "two<|im_end|>"]


def test_a_last_turn_with_another_end() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    assert said(template, [USER, ANSWER, USER, ANSWER]) == ["two<|end|>", "two<|return|>"]


def test_the_token_of_the_next_message_ends_a_turn_without_an_end() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    assert said(template, [USER, ANSWER, USER, ANSWER]) == ["two<|user|>", "two"]
    assert said(template, [USER, ANSWER, ANSWER]) == ["two", "two"]  # the start of an answer is not an end


def test_what_cannot_be_determined_is_a_fault() -> None:
    backwards = "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
    assert said(backwards, [USER, ANSWER])["fault"] == "unclear"
    counted = "{% for m in messages %}{{ m.content | length }} {{ messages | length }}{% endfor %}"
    assert said(counted, [USER, ANSWER], checks=False)["fault"] == "unclear"


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
THOUGHTS = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is false %}()"
    "{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (CALL, "tool_calls"),
        (ANSWER | {"reasoning_content": "hm"}, "reasoning_content"),
        (ANSWER | {"thinking": "hm"}, "thinking"),
    ],
)
def test_a_field_that_the_template_does_not_write_is_a_fault(message: dict[str, Any], field: str) -> None:
    found = said(PLAIN, [USER, message, *([RESULT, ANSWER] if "tool_calls" in message else [])])
    assert (found["fault"], found["message"], found["field"]) == ("lost", 1, field)


def test_a_role_that_the_template_does_not_write_is_a_fault() -> None:
    template = "{% for m in messages if m.role != 'tool' %}" + PLAIN.partition("%}")[2]
    found = said(template, [USER, ANSWER, RESULT, ANSWER])
    assert (found["fault"], found["message"], found["field"]) == ("lost", 2, "content")


def test_thoughts_in_the_content_that_the_template_does_not_write_are_a_fault() -> None:
    template = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
    thought = {"role": "assistant", "content": "<think>hm</think>\n\ntwo"}
    found = said(template, [USER, thought])
    assert (found["fault"], found["message"], found["field"]) == ("lost", 1, "inline")
    assert said(template, [USER, thought, USER, ANSWER]) == ["assistant: \n\ntwo<|end|>", "assistant: two<|end|>"]
    assert said(PLAIN, [USER, thought]) == ["assistant: <think>hm</think>\n\ntwo<|end|>"]


def test_fields_without_text_and_thoughts_of_earlier_turns_may_be_missing() -> None:
    assert said(PLAIN, [USER, ANSWER | {"tool_calls": [], "thinking": "", "name": "x"}]) == ["assistant: two<|end|>"]
    earlier = ANSWER | {"thinking": "hm"}
    assert said(THOUGHTS, [USER, earlier, USER, ANSWER]) == ["two<|end|>", "two<|end|>"]


def test_thoughts_get_the_name_that_the_template_reads() -> None:
    assert said(THOUGHTS, [USER, ANSWER | {"reasoning_content": "hm"}]) == ["(hm)two<|end|>"]


def test_thoughts_with_a_prompt_that_turns_thinking_off_are_a_fault() -> None:
    chat = [USER, ANSWER | {"thinking": "hm"}]
    assert said(THOUGHTS, chat, enable_thinking=False)["fault"] == "thoughts"
    assert said(THOUGHTS, chat, enable_thinking=True) == ["(hm)two<|end|>"]
    assert (
        said(THOUGHTS, [USER, ANSWER | {"content": "<think>hm</think>x"}], enable_thinking=False)["fault"] == "thoughts"
    )
