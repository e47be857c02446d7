from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import SPECIALS, byte_level, metaspace, saved

from forerun.data.source.rows import BadRow, RowPlace, SourceRow
from forerun.data.tokens.document import Encoded, Encoder, conversation_of, plain_texts
from forerun.data.tokens.recipe import Recipe, is_validation
from forerun.hub.chat.template import CHATML

EOS = 0


def encode(path: str, form: str, *rows: dict[str, Any], vocab: int = 1000, **settings: Any) -> list[Encoded | BadRow]:
    recipe = Recipe(path, "", 256 if path == "bytes" else EOS, vocab, **settings)
    return Encoder(recipe, form).encode([SourceRow(values, RowPlace("f.jsonl", n)) for n, values in enumerate(rows, 1)])


def pairs(found: list[Encoded | BadRow]) -> list[tuple[list[int], list[bool] | None]]:
    assert all(isinstance(one, Encoded) for one in found), found
    return [(one.tokens.tolist(), one.learned if one.learned is None else one.learned.tolist()) for one in found]  # type: ignore[union-attr]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return saved(byte_level(), tmp_path)


def test_text_ends_and_is_learned_whole(path: str) -> None:
    texts = ["the quick brown fox", "Grüße 😀\n", "<think> Yes."]
    found = pairs(encode(path, "text", *({"text": text} for text in texts)))
    assert found == [([*byte_level().encode(text).ids, EOS], None) for text in texts]
    assert pairs(encode("bytes", "text", {"text": "é!"})) == [([0xC3, 0xA9, 0x21, 256], None)]


def test_special_tokens_in_a_text_are_plain_unless_asked(path: str) -> None:
    text = "the <|im_end|>\n<|endoftext|>dog<think>"
    ((ids, _),) = pairs(encode(path, "text", {"text": text}))
    names = [byte_level().id_to_token(token) for token in ids[:-1]]
    assert not set(names) & set(SPECIALS)
    assert "<think>" in names
    assert byte_level().decode(ids[:-1], skip_special_tokens=False) == text
    ((asked, _),) = pairs(encode(path, "text", {"text": text}, special_tokens=True))
    assert asked == [*byte_level().encode(text).ids, EOS]
    assert len(asked) < len(ids)


def test_only_the_completion_is_learned(path: str) -> None:
    row = {"prompt": "the qui", "completion": "ck brown"}
    prompt, completion = (byte_level().encode(row[name]).ids for name in ("prompt", "completion"))
    assert byte_level().encode("the quick brown").ids != prompt + completion, "the border must matter"
    mask = [False] * len(prompt) + [True] * (len(completion) + 1)
    assert pairs(encode(path, "prompt/completion", row)) == [(prompt + completion + [EOS], mask)]
    assert pairs(encode(path, "prompt/completion", row, loss_on="all")) == [(prompt + completion + [EOS], None)]


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_completion_is_no_beginning(scheme: str, tmp_path: Path) -> None:
    made = metaspace(scheme)
    row = {"prompt": "the quick ", "completion": "brown fox"}
    ((ids, mask),) = pairs(encode(saved(made, tmp_path), "prompt/completion", row))
    answer = [made.id_to_token(token) for token, mine in zip(ids, mask or [], strict=True) if mine]
    if scheme == "first":
        assert made.decode(ids[:-1]) == "the quick brown fox"
        assert not answer[0].startswith("▁")
    else:
        assert answer[0].startswith("▁")


def test_given_ids(path: str) -> None:
    rows = [
        {"input_ids": [5, 6, 7]},
        {"input_ids": [5, 6, EOS], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6], "loss_mask": [0, 1]},
        {"input_ids": [5, 6], "loss_mask": [1, 1]},
    ]
    assert pairs(encode(path, "input_ids", *rows)) == [
        ([5, 6, 7, EOS], None),
        ([5, 6, EOS], [False, True, True]),
        ([5, 6, EOS], [False, True, True]),
        ([5, 6, EOS], None),
    ]
    assert pairs(encode(path, "input_ids", rows[1], loss_on="all")) == [([5, 6, EOS], None)]


@pytest.mark.parametrize(
    ("form", "row", "code", "value"),
    [
        ("input_ids", {"input_ids": [1, 70000]}, "E-DATA-097", "70000"),
        ("input_ids", {"input_ids": [1, -1]}, "E-DATA-097", "-1"),
        ("input_ids", {"input_ids": [1, 2], "loss_mask": [0, 0]}, "E-DATA-096", "loss_mask"),
        ("text", {"text": ""}, "E-DATA-106", ""),
        ("text", {"text": "a\ud800"}, "E-DATA-108", ""),
        ("prompt/completion", {"prompt": "", "completion": ""}, "E-DATA-106", ""),
    ],
    ids=str,
)
def test_a_bad_row_among_good_ones(path: str, form: str, row: dict[str, Any], code: str, value: str) -> None:
    good = {"input_ids": [1, 2], "text": "dog", "prompt": "the", "completion": "dog"}
    good = {name: good[name] for name in form.split("/")}
    before, bad, after = encode(path, form, good, row, good, vocab=50257)
    assert isinstance(bad, BadRow)
    assert (str(bad.place), bad.code) == ("f.jsonl, line 2", code)
    assert value in bad.what
    assert bad.why
    assert bad.fix
    assert isinstance(before, Encoded)
    assert isinstance(after, Encoded)
    assert before.tokens.tolist() == after.tokens.tolist()


def test_ids_of_a_text_are_held_to_the_models_vocabulary(path: str) -> None:
    (bad,) = encode(path, "text", {"text": "dog"}, vocab=10)
    assert isinstance(bad, BadRow)
    assert "vocabulary of 10" in bad.what


def test_validation_depends_on_the_content_alone() -> None:
    rows = [{"text": f"document {n}"} for n in range(4000)]
    sides = [is_validation(row, 0.1) for row in rows]
    assert 0.08 < np.mean(sides) < 0.12
    assert [is_validation(dict(row), 0.1) for row in rows] == sides
    more = [is_validation(row, 0.2) for row in rows]
    assert all(larger for smaller, larger in zip(sides, more, strict=True) if smaller)
    assert not any(is_validation(row, 0.0) for row in rows)


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
