from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from forerun.config.schema import Part
from forerun.data.source.rows import Bad, Row
from forerun.data.source.sources import Source, open_source
from forerun.errors import UserError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
OTHER = [{"role": "system", "content": ""}, *CHAT, {"role": "critic", "content": "hm"}]
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
FORMS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "a"}, {"text": " b "}],
    "messages": [{"messages": CHAT}, {"messages": OTHER}],
    "prompt/completion": [{"prompt": "a", "completion": "b"}, {"prompt": "", "completion": "d"}],
    "input_ids": [{"input_ids": [1, 2, 2**31 - 1]}, {"input_ids": [0]}],
    "chosen/rejected": [{"chosen": "a", "rejected": "b", "prompt": "p"}, {"chosen": "c", "rejected": "", "prompt": ""}],
}


def opened(path: Path, **columns: str) -> Source:
    return open_source(Part(path=str(path), columns=columns))


def rows_of(source: Source) -> list[Row | Bad]:
    return [row for piece in source.pieces(1 << 40) for row in source.rows(piece)]


def values_of(path: Path, **columns: str) -> list[dict[str, Any]]:
    found = []
    for row in rows_of(opened(path, **columns)):
        assert isinstance(row, Row), row
        found.append(row.values)
    return found


def bad_of(path: Path, row: dict[str, Any], good: dict[str, Any], **columns: str) -> Bad:
    """The one bad row, written between two good ones."""
    path.write_text("".join(json.dumps(each) + "\n" for each in (good, row, good)))
    first, bad, last = rows_of(opened(path, **columns))
    assert isinstance(first, Row)
    assert isinstance(last, Row)
    assert isinstance(bad, Bad)
    assert bad.place == (str(path), 2, "line")
    return bad


def written(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 1, **row}) + "\n" for row in rows))
        return
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (the data extra)")
    table = arrow.Table.from_pylist([{"id": 1, **row} for row in rows])
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        with arrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_recognised_and_gives_back_what_was_written(tmp_path: Path, name: str, form: str) -> None:
    written(tmp_path / name, FORMS[form])
    assert opened(tmp_path / name).form == form
    assert values_of(tmp_path / name) == FORMS[form]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_may_have_columns_of_other_names(tmp_path: Path, name: str, form: str) -> None:
    roles = [role for role in FORMS[form][0] if role != "prompt" or form == "prompt/completion"]
    rows = [{(f"my {role}" if role in roles else role): held for role, held in row.items()} for row in FORMS[form]]
    written(tmp_path / name, rows)
    assert values_of(tmp_path / name, **{role: f"my {role}" for role in roles}) == FORMS[form]
    with pytest.raises(UserError, match=r"no column 'text'"):
        opened(tmp_path / name)


@pytest.mark.parametrize(
    ("names", "columns", "form"),
    [
        ("text messages", {}, "text"),
        ("text messages", {"messages": "messages"}, "messages"),
        ("text prompt completion", {"completion": "text"}, "prompt/completion"),
        ("prompt chosen rejected completion", {}, "chosen/rejected"),
        ("prompt chosen rejected completion", {"completion": "completion"}, "prompt/completion"),
        ("prompt chosen rejected", {"prompt": "prompt", "chosen": "chosen"}, "chosen/rejected"),
        ("input_ids labels", {}, "input_ids"),
    ],
)
def test_the_first_form_wins_unless_a_column_is_mapped(
    tmp_path: Path, names: str, columns: dict[str, str], form: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(names.split(), "x")))
    assert opened(tmp_path, **columns).form == form


def test_what_was_recognised_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": CHAT, "q": "a", "completion": "b", "ids": [1]}))
    said = {
        "1 file, jsonl, chat, column conversations": {"messages": "conversations"},
        "1 file, jsonl, prompt and completion, columns q, completion": {"prompt": "q"},
        "1 file, jsonl, tokenized already, column ids": {"input_ids": "ids"},
        "1 file, jsonl, column q": {"text": "q"},
    }
    assert [opened(tmp_path, **columns).recognised for columns in said.values()] == list(said)
    with pytest.raises(UserError) as caught:
        opened(tmp_path)
    assert caught.value.fix == "try data.columns.messages=conversations"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_sharegpt_becomes_messages(tmp_path: Path, name: str) -> None:
    said = [("system", "be kind"), ("human", "hi"), ("gpt", "hello"), ("tool", "42")]
    written(tmp_path / name, [{"conversations": [{"from": who, "value": what} for who, what in said]}])
    (row,) = values_of(tmp_path, messages="conversations")
    roles = ["system", "user", "assistant", "tool"]
    assert row == {"messages": [{"role": role, "content": said[at][1]} for at, role in enumerate(roles)]}


@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
@pytest.mark.parametrize(("asks", "answers"), [("human", "gpt"), ("human", "bot"), ("user", "chatgpt")])
def test_other_names_of_the_roles_are_known(tmp_path: Path, keys: tuple[str, str], asks: str, answers: str) -> None:
    said = [("system", "be kind"), (asks, "hi"), (answers, "hello")]
    written(tmp_path / "a.jsonl", [{"messages": [dict(zip(keys, one, strict=True)) for one in said]}])
    (row,) = values_of(tmp_path)
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
    assert [message["content"] for message in row["messages"]] == ["be kind", "hi", "hello"]


def test_unknown_roles_are_named(tmp_path: Path) -> None:
    written(
        tmp_path / "a.jsonl", [{"messages": [{"role": "asker", "content": "a"}, {"role": "clerk", "content": "b"}]}]
    )
    source = opened(tmp_path)
    (bad,) = source.rows(source.pieces(1 << 20)[0])
    assert isinstance(bad, Bad)
    assert "'asker', 'clerk'" in bad.why


def test_a_call_of_a_tool_needs_no_content_and_fields_that_were_not_given_do_not_appear(tmp_path: Path) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "1"}]
    for name in ("a.jsonl", "a.parquet"):
        written(tmp_path / name, [{"messages": messages}])
        assert values_of(tmp_path / name) == [{"messages": messages}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}))
    (row,) = values_of(tmp_path / "a.jsonl")
    assert row["messages"][0]["content"] is None


BAD_MESSAGES: list[tuple[Any, str]] = [
    ("hi", "column 'messages' holds text, not a list of messages"),
    (None, "column 'messages' holds null, not a list of messages"),
    ([], "column 'messages' holds no text of the assistant"),
    (CHAT[:1], "column 'messages' holds no text of the assistant"),
    ([CHAT[0], {"role": "assistant", "content": " \n"}], "column 'messages' holds no text of the assistant"),
    ([*CHAT, "x"], "messages[2] holds text, not a message"),
    ([{"role": "user"}, *CHAT], "messages[0] has no 'content'"),
    ([{"content": "x"}, *CHAT], "messages[0] has no 'role'"),
    ([{"role": 1, "content": "x"}, *CHAT], "messages[0].role holds a number, not text"),
    ([{"role": "user", "content": None}, *CHAT], "messages[0].content holds null, not text"),
    ([{"role": "user", "content": [{"type": "text"}]}, *CHAT], "messages[0].content holds a list, not text"),
    ([{"role": "assistant", "content": None}, *CHAT], "messages[0].content holds null, not text"),
    ([{"role": "user", "content": "\ud83d"}, *CHAT], "column 'messages[0].content' holds half a character"),
    ([{"role": "user", "content": "x", "name": ["\udc00"]}, *CHAT], "column 'messages[0].name' holds half a character"),
]


@pytest.mark.parametrize(("value", "what"), BAD_MESSAGES)
def test_bad_messages_are_told_and_passed_over(tmp_path: Path, value: Any, what: str) -> None:
    assert bad_of(tmp_path / "a.jsonl", {"messages": value}, {"messages": CHAT}).what == what


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a"}, "no column 'completion'"),
        ({"prompt": "a", "completion": ""}, "column 'completion' holds no text"),
        ({"prompt": 1, "completion": "b"}, "column 'prompt' holds a number, not text"),
        ({"prompt": "a", "completion": ["b"]}, "column 'completion' holds a list, not text"),
    ],
)
def test_bad_prompts_and_completions_are_told(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    assert bad_of(tmp_path / "a.jsonl", row, {"prompt": "a", "completion": "b"}).what == what


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"input_ids": []}, "column 'input_ids' is empty"),
        ({"input_ids": "1 2"}, "column 'input_ids' holds text, not a list of token ids"),
        ({"input_ids": [1, 2.0]}, "input_ids[1] holds a number, not a token id"),
        ({"input_ids": [True]}, "input_ids[0] holds true/false, not a token id"),
        ({"input_ids": [1, None]}, "input_ids[1] holds null, not a token id"),
        ({"input_ids": [1, -1]}, "input_ids[1] is no token id"),
        ({"input_ids": [2**31]}, "input_ids[0] is no token id"),
        ({"input_ids": [10**3000]}, "input_ids[0] is no token id"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "column 'loss_mask' is of another length than 'input_ids'"),
        ({"input_ids": [1], "loss_mask": [2]}, "loss_mask[0] holds a number, not 0 or 1"),
        ({"input_ids": [1], "loss_mask": None}, "column 'loss_mask' holds null, not a list of 0 and 1"),
    ],
)
def test_bad_token_ids_are_told(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    bad = bad_of(tmp_path / "a.jsonl", row, {"input_ids": [1]})
    assert bad.what == what
    assert len(bad.why) < 100


def test_a_loss_mask_comes_along(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", [{"input_ids": [5, 6], "loss_mask": [False, 1]}, {"input_ids": [7]}])
    assert values_of(tmp_path / "a.jsonl") == [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [7]}]
    written(tmp_path / "b.parquet", [{"input_ids": [5, 6], "loss_mask": [False, True]}])
    assert values_of(tmp_path / "b.parquet") == [{"input_ids": [5, 6], "loss_mask": [0, 1]}]


def test_csv_carries_prompts_and_no_lists(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,answer,prompt\n1,b,a\n")
    assert values_of(tmp_path / "a.csv", completion="answer") == [{"prompt": "a", "completion": "b"}]
    (tmp_path / "b.csv").write_text('messages\n"[]"\n')
    with pytest.raises(UserError, match=r"column 'messages' cannot be read from csv"):
        opened(tmp_path / "b.csv")


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [
        ("messages", "list<string>", "a list of messages"),
        ("messages", "string", "a list of messages"),
        ("input_ids", "list<double>", "a list of token ids"),
        ("text", "binary", "text"),
    ],
)
def test_a_schema_that_cannot_hold_the_form_is_refused(tmp_path: Path, column: str, kind: str, said: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (the data extra)")
    types = {"list<string>": arrow.list_(arrow.string()), "list<double>": arrow.list_(arrow.float64())}
    out = io.BytesIO()
    table = arrow.table({column: arrow.array([None], types.get(kind) or kind)})
    pytest.importorskip("pyarrow.parquet").write_table(table, out)
    (tmp_path / "a.parquet").write_bytes(out.getvalue())
    with pytest.raises(UserError, match=rf"column '{column}' holds .*, not {said}"):
        opened(tmp_path)


def test_the_first_line_that_has_a_form_tells_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('not json\n{"txet": 1}\n{"text": "a"}\n')
    assert opened(tmp_path).form == "text"
    (tmp_path / "0.jsonl").write_text("")
    assert opened(tmp_path).form == "text"


def test_another_process_gets_the_same_source(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", [{"chat": CHAT}])
    source = opened(tmp_path, messages="chat")
    copy = Source.from_json(json.loads(json.dumps(source.to_json())))
    assert copy == source
    assert rows_of(copy) == rows_of(source)
