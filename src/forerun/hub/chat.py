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
from pathlib import Path
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
WALL_SECONDS = 60.0
MEMORY_BYTES = 512 * MIB
OUTPUT_CHARACTERS = 4 * MIB

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


def render(template: str, messages: Sequence[Message], *, special: Mapping[str, str], prompt: bool = True) -> str:
    """One conversation as text. `prompt` adds the beginning of the answer; `special` are texts such as bos_token."""
    return render_all(template, [messages], special=special, prompt=prompt)[0]


def render_all(
    template: str, conversations: Sequence[Sequence[Message]], *, special: Mapping[str, str], prompt: bool = True
) -> list[str]:
    """Many conversations in one child process."""
    text = json.dumps(conversations)  # also makes plain data of it: nothing else reaches a template
    request = {
        "path": [entry or os.getcwd() for entry in sys.path],
        "template": template,
        "conversations": json.loads(text),
        "variables": dict(special) | {"add_generation_prompt": prompt},
        "cpu_seconds": CPU_SECONDS + len(conversations) // 200,
        "memory_bytes": MEMORY_BYTES + 16 * len(text),
        "output_characters": OUTPUT_CHARACTERS + 4 * len(text),
    }
    command = [sys.executable, "-I", "-S", child.__file__]
    environment = {key: os.environ[key] for key in ("TZ", "LD_LIBRARY_PATH") if key in os.environ}
    try:
        ran = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=WALL_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_much(f"it did not end within {WALL_SECONDS:.0f} seconds") from None
    if ran.returncode < 0:  # ended by the kernel
        raise _too_much(f"it used more than {request['cpu_seconds']} seconds of CPU time, or too much memory")
    if ran.returncode != 0:
        raise RuntimeError(f"the chat template's process failed: {ran.stderr.decode(errors='replace')[-2000:]}")
    return _texts(json.loads(ran.stdout))


def _texts(answer: dict[str, Any]) -> list[str]:
    fault, why = answer.get("fault"), str(answer.get("why"))[:500]
    if fault is None:
        return list(answer["texts"])
    if fault == "limit":
        raise _too_much(why)
    number = f" of conversation {answer['conversation'] + 1}" if answer.get("conversation") else ""
    if fault == "refused":
        raise UserError(
            f"the chat template refuses the messages{number}",
            why=f"it says: {why}",
            fix="change the order or the roles of the messages: most templates want user and assistant in turns",
        )
    raise UserError(
        f"the chat template cannot be used{number}",
        why=why,
        fix=f"mend {TEMPLATE_NAME} in the model's folder, or use plain prompts: forerun generate",
    )


def _too_much(why: str) -> UserError:
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
