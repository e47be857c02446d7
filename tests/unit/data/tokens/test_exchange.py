"""Alpaca prompts against axolotl's, and prompts of messages whose end is not clear."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forerun.data.source.rows import BadRow, RowPlace, SourceRow
from forerun.data.tokens.document import Encoder, conversation_of, plain_texts
from forerun.data.tokens.recipe import Recipe
from forerun.hub.chat.template import CHATML

ROW = {"instruction": "Sort {them}.", "input": "b a", "output": "a b"}
WITHOUT = {"instruction": "Greet.", "input": "", "output": "Hi"}


@pytest.mark.parametrize(
    ("row", "prompt", "asked"),
    [
        # Rendered by AlpacaPrompter of axolotl, src/axolotl/prompters.py at 067b021c8b87: the prompt in its style
        # "instruct" (the default), and the user's turn between the marks of its style "chatml".
        (
            ROW,
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\nSort {them}.\n\n### Input:\nb a\n\n### Response:\n",
            "Sort {them}.\nb a",
        ),
        (
            WITHOUT,
            "Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n### Instruction:\nGreet.\n\n### Response:\n",
            "Greet.",
        ),
    ],
)
def test_alpaca_prompts_are_those_of_axolotl(row: dict[str, str], prompt: str, asked: str) -> None:
    assert plain_texts("alpaca", row) == (prompt, row["output"])
    messages, prompts = conversation_of("alpaca", row)
    assert messages == [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    assert prompts == 0


def encoded(form: str, values: dict[str, Any], template: str = CHATML, **settings: Any) -> Any:
    recipe = Recipe("bytes", "bytes", 256, 257, template, **settings)
    (found,) = Encoder(recipe, form).encode([SourceRow(values, RowPlace("f", 1))])
    return found


def test_alpaca_rows_without_a_template_have_loss_on_the_output() -> None:
    found = encoded("alpaca", ROW)
    text = "".join(plain_texts("alpaca", ROW)).encode()
    assert found.tokens.tolist() == [*text, 256]
    assert found.tokens[found.learned].tolist() == [*b"a b", 256]


def test_a_prompt_that_the_template_changes_is_a_bad_row() -> None:
    """As Qwen3, this template writes the last answer differently."""
    template = (
        "{% for m in messages %}{{ '[' + m.role + ']' }}{% set last = '<last>' if loop.last else '' %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ last + m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = [{"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b")) * 2]
    row = {"prompt": chat[:2], "completion": chat[2:]}
    found = encoded("prompt/completion messages", row, template)
    assert isinstance(found, BadRow)
    assert found.code == "E-DATA-124"
    good = encoded("prompt/completion messages", {"prompt": chat[:3], "completion": chat[3:]}, template)
    assert bytes(good.tokens[good.learned][:-1].tolist()) == b"<last>b"
    everything = encoded("prompt/completion messages", row, template, loss_on="all")
    assert everything.learned is None or np.all(everything.learned)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_system_prompt_of_the_job_is_never_a_second_one(role: str) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    own = [{"role": role, "content": "own"}, *chat]
    for messages, count in ((chat, 1), (own, 0), ([*chat, own[0], *chat], 0)):
        tokens = encoded("messages", {"messages": messages}, system="JOB").tokens
        assert bytes(tokens[tokens < 256].tolist()).count(b"<|im_start|>system\nJOB<|im_end|>\n") == count
    pair = {"prompt": "a", "chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": "c"}]}
    for tokens, _ in encoded("chosen/rejected", pair, system="JOB").documents:
        assert bytes(tokens[:14].tolist()) == b"<|im_start|>sy"
