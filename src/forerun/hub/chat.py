"""Chat templates: the text that a list of messages becomes before the model reads it.

A template is a program of a stranger. It runs in a child process (`template.py`) that has jinja2's sandbox, no
environment, and the kernel's limits on CPU time, memory and files: an endless loop in Python code could be counted,
but `'x' * 10**10` is one call into C, which only the kernel ends.
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

from forerun.errors import UserError
from forerun.hub import template as child
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
RUN_MESSAGES = 100_000  # that one process writes to find the answers
SPOKEN_DATE = (
    "2024-07-26"  # what data is written with must not depend on the day; Llama's own template falls back to it
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Message = Mapping[str, Any]


def chat_template(folder: Path, name: str = DEFAULT) -> str | None:
    """The template of a checkpoint's folder: chat_template.jinja, else tokenizer_config.json; None if it has none."""
    file = folder / TEMPLATE_NAME
    if name == DEFAULT and os.path.lexists(file):
        return _read(file, roots_of(folder))
    config = folder / CONFIG_NAME
    if not os.path.lexists(config):
        return None
    found = read_json(config, roots=roots_of(folder)).get("chat_template")
    if found is None or isinstance(found, str):
        return found
    named = {entry.get("name"): entry.get("template") for entry in found} if _is_list_of_objects(found) else {}
    template = named.get(name)
    if not isinstance(template, str):
        raise UserError(
            f"{config} has no chat template named {name!r}",
            why=f"it names {', '.join(shown(str(known)) for known in named) or 'none that can be read'}",
            fix=f"write the template to use to {file}",
        )
    return template


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special: Mapping[str, str],
    prompt: bool = True,
    origin: str | None = None,
) -> str:
    """Return one conversation as text.

    `prompt` adds the beginning of the answer; `special` are texts such as bos_token. `origin` says in errors where the
    template comes from: the job's key and file, or a file. None is the model's own template.
    """
    return render_all(template, [messages], special=special, prompt=prompt, origin=origin)[0]


def render_all(
    template: str,
    conversations: Sequence[Sequence[Message]],
    *,
    special: Mapping[str, str],
    prompt: bool = True,
    origin: str | None = None,
) -> list[str]:
    """Render many conversations in one child process."""
    variables = dict(special) | {"add_generation_prompt": prompt}
    answer = _run(template, conversations, variables, renders=len(conversations), origin=origin)
    if "fault" in answer:
        raise _error(answer, origin)
    return list(answer["texts"])


@dataclass(frozen=True)
class Spoken:
    """A conversation as text, and the spans of its characters that the assistant says."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Unspoken:
    """A conversation that the template cannot write, or whose answers cannot be told apart."""

    what: str
    why: str
    fix: str


def spoken_all(
    template: str,
    conversations: Sequence[Sequence[Message]],
    *,
    special: Mapping[str, str],
    ends: Sequence[str],
    answers: bool = True,
    origin: str | None = None,
) -> list[Spoken | Unspoken]:
    """Many conversations in one child process, with what the assistant says in each.

    With generation marks in the template these are the marks' insides. Without, an answer begins behind the text of the
    messages before it and the generation prompt, and ends with its end of turn: space behind one of the tokens
    `ends` is not the assistant's. Without `answers` there is only the text.
    """
    half = len(conversations) // 2
    if half and sum(len(messages) * (1 + 2 * _answers(messages)) for messages in conversations) > RUN_MESSAGES:
        parts = conversations[:half], conversations[half:]
        more = {"special": special, "ends": ends, "answers": answers, "origin": origin}
        return [one for part in parts for one in spoken_all(template, part, **more)]  # type: ignore[arg-type]
    renders = sum(1 + 2 * _answers(messages) for messages in conversations)
    messages = sum(len(messages) * (1 + 2 * _answers(messages)) for messages in conversations)
    growth = max((1 + 2 * _answers(messages) for messages in conversations), default=1)
    variables = dict(special) | {"add_generation_prompt": False}
    answer = _run(
        template,
        conversations,
        variables,
        renders=renders + messages // 8,
        growth=growth,
        more={"ends": list(ends), "answers": answers, "date": SPOKEN_DATE},
        origin=origin,
    )
    if "fault" in answer:
        raise _error(answer, origin)
    return [_spoken(found, origin) for found in answer["spoken"]]


def _answers(messages: Sequence[Message]) -> int:
    return sum(1 for message in messages if isinstance(message, Mapping) and message.get("role") == "assistant")


def _spoken(found: dict[str, Any], origin: str | None) -> Spoken | Unspoken:
    if "fault" not in found:
        return Spoken(found["text"], tuple((start, stop) for start, stop in found["spans"]))
    if found["fault"] == "unclear":
        return Unspoken(
            "what the assistant says cannot be told from the rest",
            why=f"about the chat template: {found['why'][:500]}",
            fix="data.chat_template=FILE with {% generation %} marks around the answers, or data.loss_on=all",
        )
    error = _error(found, origin)
    return Unspoken(error.what, error.why, error.fix)


def _run(
    template: str,
    conversations: Sequence[Sequence[Message]],
    variables: dict[str, Any],
    *,
    renders: int,
    growth: int = 1,
    more: Mapping[str, Any] = MappingProxyType({}),
    origin: str | None = None,
) -> dict[str, Any]:
    """The child's answer. Its limits grow with `renders` and with the text, which is written `growth` times."""
    text = json.dumps(conversations)  # also makes plain data of it: nothing else reaches a template
    request = {
        "path": [entry for entry in sys.path if entry],
        "template": template,
        "conversations": json.loads(text),
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
    if ran.returncode < 0:  # ended by the kernel
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
            f"{named} refuses the messages{number}",
            why=f"it says: {why}",
            fix="change the order or the roles of the messages: most templates want user and assistant in turns",
        )
    if origin is not None:
        return UserError(
            f"{named} cannot be used{number}",
            why=why,
            fix="fix the template at that line, or use a built-in one: data.chat_template=chatml",
        )
    return UserError(
        f"{named} cannot be used{number}",
        why=why,
        fix=f"mend {TEMPLATE_NAME} in the model's folder, or use plain prompts: forerun generate",
    )


def _too_much(why: str, origin: str | None) -> UserError:
    if origin is not None:
        return UserError(
            f"{origin}: the chat template was stopped",
            why=f"{why}; a usual template needs much less",
            fix="look for a loop without an end in it, or use a built-in one: data.chat_template=chatml",
        )
    return UserError(
        "the chat template was stopped",
        why=f"{why}; no honest template needs that",
        fix=f"do not trust this checkpoint, or put a template of your own at {TEMPLATE_NAME} in a copy of its folder",
    )


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _read(path: Path, roots: tuple[Path, ...]) -> str:
    with opened(path, roots) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MAX_TEMPLATE_BYTES:
            raise UserError(
                f"{path} cannot be used",
                why=f"it has {Bytes(size)}, more than the {Bytes(MAX_TEMPLATE_BYTES)} allowed",
                fix="fetch the file again, or mend it by hand",
            )
        raw = read_exactly(descriptor, size, 0, path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} cannot be used", why=f"byte {error.start} is not UTF-8 text", fix="fetch the file again"
        ) from None
