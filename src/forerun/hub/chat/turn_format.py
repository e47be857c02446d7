"""The regular texts between messages that a chat template writes, as a Go template for Ollama.

Ollama does not run Jinja templates. Most chat templates only put fixed texts around the messages. `turn_format` finds
these texts by rendering example conversations, and then compares further conversations. A template that does more, such
as one that removes thoughts from earlier turns, has no turn format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.errors import UserError
from forerun.hub.chat.template import Message, render_all

_SYSTEM, _FIRST, _ANSWER, _SECOND = "Systemtext", "Firstquestion", "Firstanswer", "Secondquestion"


@dataclass(frozen=True)
class TurnFormat:
    """The fixed texts of a chat format.

    Args:
      start: the text before the first question, without a system message.
      system_start: the text before a system message, or None if the template rejects one.
      system_end: the text between a system message and the first question.
      answer_start: the text between a question and its answer, in earlier turns.
      question_start: the text between an answer and the next question.
      prompt: the text between the last question and the answer that the model writes.
    """

    start: str
    system_start: str | None
    system_end: str
    answer_start: str
    question_start: str
    prompt: str

    def text(self, messages: Sequence[Message]) -> str:
        """Return the prompt of a conversation that ends with a question."""
        has_system = messages[0]["role"] == "system"
        parts = [f"{self.system_start}{messages[0]['content']}{self.system_end}" if has_system else self.start]
        turns = messages[has_system:]
        for number, message in enumerate(turns):
            if message["role"] == "user" and number:
                parts.append(self.question_start)
            elif message["role"] == "assistant":
                parts.append(self.answer_start)
            parts.append(message["content"])
        return "".join([*parts, self.prompt])

    def without_start(self, text: str) -> TurnFormat:
        """Return the format without `text` at the start of a conversation, because the runtime adds it."""
        system = self.system_start
        return replace(
            self,
            start=self.start.removeprefix(text),
            system_start=system if system is None else system.removeprefix(text),
        )

    def go_template(self) -> str:
        """Return the template that Ollama executes. All fixed texts are strings, so that no space is trimmed."""
        system = self.system_start
        opening = (
            _quoted(self.start)
            if system is None
            else f"{{{{ if $.System }}}}{_quoted(system)}{{{{ $.System }}}}{_quoted(self.system_end)}{{{{ else }}}}"
            f"{_quoted(self.start)}{{{{ end }}}}"
        )
        later = _quoted(self.question_start)
        first = f"{{{{ if $first }}}}{opening}{{{{ $first = false }}}}{{{{ else }}}}{later}{{{{ end }}}}"
        return (
            '{{ $first := true }}{{ $role := "" }}{{ range .Messages }}{{ $role = .Role }}'
            f'{{{{ if eq .Role "user" }}}}{first}{{{{ .Content }}}}'
            f'{{{{ else if eq .Role "assistant" }}}}{_quoted(self.answer_start)}{{{{ .Content }}}}{{{{ end }}}}'
            f'{{{{ end }}}}{{{{ if ne $role "assistant" }}}}{_quoted(self.prompt)}{{{{ end }}}}'
        )


def turn_format(template: str, special: Mapping[str, Any]) -> TurnFormat | None:
    """Return the format of a chat template, or None if it is not made of fixed texts around the messages."""
    try:
        found = _found(template, special)
        if found is None or not _holds(found, template, special):
            return None
    except UserError:
        return None
    return found


def _found(template: str, special: Mapping[str, Any]) -> TurnFormat | None:
    (text,) = render_all(template, [_turns(_FIRST, _ANSWER, _SECOND)], special=special)
    parts = _split(text, [_FIRST, _ANSWER, _SECOND])
    if parts is None:
        return None
    start, answer_start, question_start, prompt = parts
    plain = TurnFormat(start, None, "", answer_start, question_start, prompt)
    try:
        (text,) = render_all(template, [[_system(_SYSTEM), *_turns(_FIRST)]], special=special)
    except UserError:  # Gemma 1 and 2 and Mistral 7B reject system messages
        return plain
    parts = _split(text, [_SYSTEM, _FIRST])
    if parts is None or parts[2] != prompt:
        return None
    return replace(plain, system_start=parts[0], system_end=parts[1])


def _holds(found: TurnFormat, template: str, special: Mapping[str, Any]) -> bool:
    """Return whether the format renders other conversations as the template does."""
    conversations = [
        _turns("Why?"),
        _turns("Why?", "Because.", "When?", "Now.", "Where?\n\nHere?"),
        _turns("a b", "<think>\nc\n</think>\n\nd", "e", "f g", "h"),
    ]
    if found.system_start is not None:
        conversations += [[_system("Be brief."), *conversation] for conversation in conversations]
    return [found.text(messages) for messages in conversations] == render_all(template, conversations, special=special)


def _turns(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def _system(content: str) -> Message:
    return {"role": "system", "content": content}


def _split(text: str, contents: Sequence[str]) -> list[str] | None:
    """Return the texts before, between and after the contents, or None unless each occurs once, in this order."""
    parts = []
    for content in contents:
        before, found, text = text.partition(content)
        if not found or content in text:
            return None
        parts.append(before)
    return [*parts, text]


def _quoted(text: str) -> str:
    """Return an action that writes the text. JSON's escapes are those of Go, up to U+FFFF."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""
