"""The chat templates in TRL's package, conversations for them, and a tokenizer in which every byte is a token."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>",
    "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|tool>", "<tool|>", '<|"|>', "<|think|>", "<|start|>",
    "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|system|>", "<s>", "</s>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|tool_call_start|>",
    "<|tool_call_end|>",
]  # fmt: skip
Message = dict[str, Any]
Chat = tuple[list[Message], list[Any] | None]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "a city"}},
                "required": ["city"],
            },
        },
    }
]


def template(name: str) -> str:
    """Return a template of TRL's package. The package itself is not imported, which would take seconds."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed: scripts/torch")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@cache
def byte_tokens() -> tokenizers.Tokenizer:
    """Return a tokenizer in which every byte is a token, and so is every special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return made


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, thought: str | None = None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **({"reasoning_content": thought} if thought else {}), **more}


def call(arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "weather", **arguments}}]}


PARIS = call({"arguments": {"city": "Paris"}})
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": "sunny"}
CHATS: dict[str, Chat] = {
    "one turn": ([user("Hi?"), answer("Hello.")], None),
    "two turns": ([user("Hi?"), answer("Hello."), user("And?"), answer("Bye.")], None),
    "thoughts": ([user("Hi?"), answer("Hello.", "Greet.")], None),
    "two turns with thoughts": (
        [user("Hi?"), answer("Hello.", "Greet."), user("And?"), answer("Bye.", "Leave.")],
        None,
    ),
    "a tool": ([user("Weather?"), answer("", **PARIS), RESULT, answer("It is sunny.")], TOOLS),
    "a tool without texts": (
        [
            user("Weather?"),
            answer("", **call({"arguments": {"day": 2}})),
            RESULT,
            answer("It is sunny."),
            user("Thanks."),
            answer("Welcome."),
        ],
        TOOLS,
    ),
    "a tool with thoughts": (
        [
            user("Weather?"),
            answer("", "Ask.", **PARIS),
            RESULT,
            answer("It is sunny.", "Sun."),
            user("Thanks."),
            answer("Welcome.", "Polite."),
        ],
        TOOLS,
    ),
    "a tool and a content": ([user("Weather?"), answer("Let me see.", **PARIS), RESULT, answer("It is sunny.")], TOOLS),
}
