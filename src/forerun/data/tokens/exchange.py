"""Prompts and answers of rows: as the messages of a conversation, or as two plain texts.

Alpaca rows have an instruction, optionally an input, and an output. As messages, the user says the instruction and, on
the next line, the input. As plain text, the prompt is the one that the Alpaca models were trained with.
"""

from __future__ import annotations

from typing import Any

PROMPT_FORMS = ("prompt/completion", "alpaca")  # plain texts that can become messages
CONVERSATION_FORMS = ("messages", "prompt/completion messages")  # rows that contain messages
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{0}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{0}\n\n### Input:\n{1}\n\n### Response:\n"
)


def conversation_of(form: str, values: dict[str, Any]) -> tuple[list[Any], int]:
    """Return the messages of a row, and how many of them are the prompt, whose answers have no loss."""
    if form == "messages":
        return values["messages"], 0
    if form == "alpaca":
        said = values.get("input", "")
        asked = f"{values['instruction']}\n{said}" if said else values["instruction"]
        return [_message("user", asked), _message("assistant", values["output"])], 0
    prompt, completion = values["prompt"], values["completion"]
    asked = [_message("user", prompt)] if isinstance(prompt, str) else prompt
    answer = [_message("assistant", completion)] if isinstance(completion, str) else completion
    return [*asked, *answer], len(asked)


def plain_texts(form: str, values: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt and the completion of a row, to be joined without a chat template."""
    if form != "alpaca":
        return values["prompt"], values["completion"]
    said = values.get("input", "")
    asked = _ALPACA_WITH_INPUT if said else _ALPACA
    return asked.format(values["instruction"], said), values["output"]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
