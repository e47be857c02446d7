"""Chat templates, which convert a list of messages to the text that a model reads.

A template is an untrusted program. It runs in a child process (`render_process.py`) with jinja2's sandbox, without
environment variables, and with kernel limits on CPU time, memory and files. Limits in Python code would not be enough:
`'x' * 10**10` is one call into C, which only the kernel can stop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forerun.errors import Problem, UserError
from forerun.hub.chat import render_process as child
from forerun.hub.chat.render_process import SWITCHES
from forerun.hub.documents import read_json
from forerun.hub.files import opened, read_exactly, roots_of, shown
from forerun.units import MIB, Bytes

TEMPLATE_NAME, CONFIG_NAME = "chat_template.jinja", "tokenizer_config.json"
DEFAULT = "default"
MAX_TEMPLATE_BYTES = MIB
CPU_SECONDS = 2
CPU_SECONDS_PER_RENDER = 1 / 200
WALL_SECONDS = 60.0
MEMORY_BYTES = 512 * MIB
OUTPUT_CHARACTERS = 4 * MIB
RUN_MESSAGES = 100_000  # messages that one process renders to find the answers
# The date in training data must not depend on the day. The template of Llama uses this date as its default.
SPOKEN_DATE = "2024-07-26"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Message = Mapping[str, Any]


def chat_template(folder: Path) -> str | None:
    """Return the chat template of a checkpoint, or None if it has none.

    The default template is in chat_template.jinja, or else in tokenizer_config.json, which may have several.
    """
    file = folder / TEMPLATE_NAME
    if os.path.lexists(file):
        return _read(file, roots_of(folder))
    config = folder / CONFIG_NAME
    if not os.path.lexists(config):
        return None
    found = read_json(config, roots=roots_of(folder)).get("chat_template")
    if found is None or isinstance(found, str):
        return found
    entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries}
    template = named.get(DEFAULT)
    if not isinstance(template, str):
        raise UserError(
            "E-HUB-001",
            f"{config} has no chat template named {DEFAULT!r}",
            why=f"its templates are {', '.join(shown(str(known)) for known in named) or 'not readable'}",
            fix=f"write the template to {file}",
        )
    return template


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special: Mapping[str, Any],
    prompt: bool = True,
    origin: str | None = None,
) -> str:
    """Return one conversation as text.

    Args:
        template: The source of the template.
        messages: The messages of the conversation.
        special: Texts of special tokens, such as bos_token, and other variables of the template.
        prompt: Whether to add the generation prompt, which starts the answer.
        origin: Where the template comes from, for errors: the job's key and file, or a file. None means the model.

    Raises:
        UserError: The template is not valid, refuses the messages, or exceeds a limit.
    """
    return render_all(template, [messages], special=special, prompt=prompt, origin=origin)[0]


def render_all(
    template: str,
    conversations: Sequence[Sequence[Message]],
    *,
    special: Mapping[str, Any],
    prompt: bool = True,
    origin: str | None = None,
) -> list[str]:
    """Return the texts of many conversations, rendered in one child process. The arguments are those of `render`."""
    variables = dict(special) | {"add_generation_prompt": prompt}
    answer = _run(template, conversations, variables, renders=len(conversations), origin=origin)
    if "fault" in answer:
        raise _error(answer, origin)
    return list(answer["texts"])


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as text, and the spans of its characters that the assistant says."""

    text: str
    spans: tuple[tuple[int, int], ...]


def render_conversations(
    template: str,
    conversations: Sequence[Sequence[Message]],
    *,
    special: Mapping[str, Any],
    ends: Sequence[str],
    tools: Sequence[Any] = (),
    answers: bool = True,
    checks: bool = False,
    origin: str | None = None,
) -> list[RenderedConversation | Problem]:
    """Return the texts of many conversations with the spans that the assistant says, or a problem for each failure.

    If the template has `{% generation %}` marks, the spans are the marked text. Otherwise an answer begins after the
    earlier messages and the generation prompt, and ends with its end of turn (see `answer_spans`).

    Args:
        template: The source of the template.
        conversations: The messages of each conversation.
        special: Texts of special tokens, such as bos_token, and other variables of the template.
        ends: End-of-turn tokens. White space after one of them is not part of the answer.
        tools: The tools of each conversation (a list of objects, or None). Empty: no conversation has tools.
        answers: Whether to find the spans. If false, they are empty.
        checks: Whether a conversation is a problem if the template does not write a part of it, or if it has thoughts
            and the generation prompt turns thinking off.
        origin: Where the template comes from, for errors. None means the model.

    Raises:
        UserError: The template is not valid or exceeds a limit.
    """
    half = len(conversations) // 2
    if half and sum(len(messages) * _renders(messages) for messages in conversations) > RUN_MESSAGES:
        more = {"special": special, "ends": ends, "answers": answers, "checks": checks, "origin": origin}
        parts = (conversations[:half], tools[:half]), (conversations[half:], tools[half:])
        return [
            one
            for part, some in parts
            for one in render_conversations(template, part, tools=some, **more)  # type: ignore[arg-type]
        ]
    renders = sum(map(_renders, conversations))
    messages = sum(len(messages) * _renders(messages) for messages in conversations)
    growth = max(map(_renders, conversations), default=1)
    variables = dict(special) | {"add_generation_prompt": False}
    answer = _run(
        template,
        conversations,
        variables,
        renders=renders + messages // 8,
        growth=growth,
        tools=tools,
        more={"ends": list(ends), "answers": answers, "checks": checks, "date": SPOKEN_DATE},
        origin=origin,
    )
    if "fault" in answer:
        raise _error(answer, origin)
    return [_spoken(found, origin) for found in answer["spoken"]]


def thinking_switch(template: str, special: Mapping[str, Any], origin: str | None = None) -> str | None:
    """Return the variable that turns thinking on and off in the template's generation prompt, or None.

    The template must write different prompts for both values: a name in its text is not enough.
    """
    question = [{"role": "user", "content": "?"}]
    for name in SWITCHES:
        on, off = (
            render(template, question, special={**special, name: value}, origin=origin) for value in (True, False)
        )
        if on != off:
            return name
    return None


def _renders(messages: Sequence[Message]) -> int:
    """Return how often a conversation is rendered at most, except to find a part that the template does not write."""
    answers = sum(1 for message in messages if isinstance(message, Mapping) and message.get("role") == "assistant")
    return 2 + 5 * answers


def _spoken(found: dict[str, Any], origin: str | None) -> RenderedConversation | Problem:
    if "fault" not in found:
        return RenderedConversation(found["text"], tuple((start, stop) for start, stop in found["spans"]))
    if found["fault"] == "unclear":
        return Problem(
            "E-HUB-002",
            "the assistant's part of the text cannot be determined",
            why=f"about the chat template: {found['why'][:500]}",
            fix="set data.chat_template=FILE with {% generation %} marks around the answers, or data.loss_on=all",
        )
    if found["fault"] == "lost":
        return _lost(found["message"], found["field"], origin)
    if found["fault"] == "thoughts":
        return Problem(
            "E-HUB-061",
            "the row has thoughts, and the chat template turns thinking off",
            why="its generation prompt tells the model not to think, so the model would never use what it learns",
            fix="set data.thinking=true, or remove the thoughts: data.ignored_fields=[reasoning_content]",
        )
    error = _error(found, origin)
    return Problem(**error.parts())


def _lost(number: int | None, field: str, origin: str | None) -> Problem:
    """Return the problem of a field that the template does not write."""
    named = "the chat template" if origin is None else f"{origin}: the chat template"
    part = "the tools of the row" if number is None else f"{field!r} of message {number + 1}"
    if field == "inline":
        part = f"the thoughts in the content of message {(number or 0) + 1}"
    return Problem(
        "E-HUB-060",
        f"{named} omits {part}",
        why="the rendered text is the same without it, so the model would not learn it",
        fix="use a template that writes it: data.chat_template=FILE; or "
        + ("remove it from the row" if field in ("content", "inline") else f"data.ignored_fields=[{field}]"),
    )


def _run(
    template: str,
    conversations: Sequence[Sequence[Message]],
    variables: dict[str, Any],
    *,
    renders: int,
    growth: int = 1,
    tools: Sequence[Any] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
    origin: str | None = None,
) -> dict[str, Any]:
    """Return the answer of the child process.

    Its limits grow with the number of `renders` and with the size of the text, which is rendered `growth` times.
    """
    # JSON also reduces the messages to plain data, so that no other object is reachable.
    text = json.dumps([conversations, list(tools) or [None] * len(conversations)])
    plain = json.loads(text)
    request = {
        "path": [entry for entry in sys.path if entry],
        "template": template,
        "conversations": plain[0],
        "tools": plain[1],
        "variables": variables,
        "cpu_seconds": CPU_SECONDS + int(CPU_SECONDS_PER_RENDER * renders),
        "memory_bytes": MEMORY_BYTES + 16 * len(text),
        "output_characters": OUTPUT_CHARACTERS * growth + 4 * len(text) * growth,
        **more,
    }
    command = [sys.executable, "-I", "-S", child.__file__]
    environment = {key: os.environ[key] for key in ("TZ", "LD_LIBRARY_PATH") if key in os.environ}
    try:
        ran = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=WALL_SECONDS + CPU_SECONDS_PER_RENDER * renders,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_much(f"it did not end within {WALL_SECONDS:.0f} seconds", origin) from None
    if ran.returncode < 0:  # killed by a signal of the kernel
        raise _too_much(f"it used more than {request['cpu_seconds']} seconds of CPU time, or too much memory", origin)
    if ran.returncode != 0:
        raise RuntimeError(f"the chat template's process failed: {ran.stderr.decode(errors='replace')[-2000:]}")
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def _error(answer: dict[str, Any], origin: str | None) -> UserError:
    fault, why = answer["fault"], str(answer.get("why"))[:500]
    if fault == "limit":
        return _too_much(why, origin)
    named = "the chat template" if origin is None else f"{origin}: the chat template"
    number = f" of conversation {answer['conversation'] + 1}" if answer.get("conversation") else ""
    if fault == "refused":
        return UserError(
            "E-HUB-003",
            f"{named} refuses the messages{number}",
            why=f"it says: {why}",
            fix="change the order or roles of the messages: most templates need alternating user and assistant",
        )
    if origin is not None:
        return UserError(
            "E-HUB-004",
            f"{named} cannot be used{number}",
            why=why,
            fix="fix the template at that line, or use a built-in one: data.chat_template=chatml",
        )
    return UserError(
        "E-HUB-005",
        f"{named} cannot be used{number}",
        why=why,
        fix=f"correct {TEMPLATE_NAME} in the model's folder, or use plain prompts: forerun generate",
    )


def _too_much(why: str, origin: str | None) -> UserError:
    if origin is not None:
        return UserError(
            "E-HUB-006",
            f"{origin}: the chat template was stopped",
            why=f"{why}; a usual template needs much less",
            fix="look for an endless loop in it, or use a built-in one: data.chat_template=chatml",
        )
    return UserError(
        "E-HUB-007",
        "the chat template was stopped",
        why=f"{why}; no legitimate template needs that",
        fix=f"do not trust this checkpoint, or put your own template into {TEMPLATE_NAME} in a copy of its folder",
    )


def _read(path: Path, roots: tuple[Path, ...]) -> str:
    with opened(path, roots) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MAX_TEMPLATE_BYTES:
            raise UserError(
                "E-HUB-008",
                f"{path} cannot be used",
                why=f"it has {Bytes(size)}, more than the {Bytes(MAX_TEMPLATE_BYTES)} allowed",
                fix="download the file again, or correct it",
            )
        raw = read_exactly(descriptor, size, 0, path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            "E-HUB-009",
            f"{path} cannot be used",
            why=f"byte {error.start} is not UTF-8 text",
            fix="download the file again",
        ) from None


# ---- The text that a chat template writes after an answer to end the assistant's turn ----


QUESTION, ANSWER = "Which answer?", "Thisanswer"
PROBE = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


def turn_tail(template: str, special: Mapping[str, Any]) -> str:
    """Return the text that follows an answer in its turn, such as `<|im_end|>`, or "" if there is none.

    The template renders one short conversation. If that fails, the result is "" too: the cause is reported later, when
    the user's own messages are rendered.
    """
    try:
        (found,) = render_conversations(template, [PROBE], special=special, ends=())
    except UserError:
        return ""
    if not isinstance(found, RenderedConversation) or not found.spans:
        return ""
    start, stop = found.spans[-1]
    said, answer, tail = found.text[start:stop].rpartition(ANSWER)
    return tail.strip() if answer or said else ""


def renders_alike(template: str, special: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the template renders the same text with both mappings of special tokens."""
    conversations = [PROBE, PROBE[:1], PROBE * 2]
    try:
        one, two = (render_all(template, conversations, special=texts) for texts in (special, other))
    except UserError:
        return False
    return one == two
