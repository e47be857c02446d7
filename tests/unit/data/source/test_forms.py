from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from forerun.config.schema import Part
from forerun.data.source.rows import BadRow, SourceRow
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


def rows_of(source: Source) -> list[SourceRow | BadRow]:
    return [row for piece in source.pieces(1 << 40) for row in source.rows(piece)]


def values_of(path: Path, **columns: str) -> list[dict[str, Any]]:
    found = []
    for row in rows_of(opened(path, **columns)):
        assert isinstance(row, SourceRow), row
        found.append(row.values)
    return found


def bad_of(path: Path, row: dict[str, Any], good: dict[str, Any], **columns: str) -> BadRow:
    """The one bad row, written between two good ones."""
    path.write_text("".join(json.dumps(each) + "\n" for each in (good, row, good)))
    first, bad, last = rows_of(opened(path, **columns))
    assert isinstance(first, SourceRow)
    assert isinstance(last, SourceRow)
    assert isinstance(bad, BadRow)
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
    with pytest.raises(UserError) as refused:
        opened(tmp_path / name)
    # Beside the column `prompt` of the pairs, an unknown name may be the answer.
    assert refused.value.code == ("E-DATA-225" if form == "chosen/rejected" else "E-DATA-024")


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
        "1 file, jsonl, already tokenized, column ids": {"input_ids": "ids"},
        "1 file, jsonl, column q": {"text": "q"},
    }
    assert [opened(tmp_path, **columns).recognised for columns in said.values()] == list(said)
    assert opened(tmp_path).recognised == next(iter(said))


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
    assert isinstance(bad, BadRow)
    assert "'asker', 'clerk'" in bad.why


def test_a_call_of_a_tool_needs_no_content_and_fields_that_were_not_given_do_not_appear(tmp_path: Path) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "1"}]
    for name in ("a.jsonl", "a.parquet"):
        written(tmp_path / name, [{"messages": messages}])
        assert values_of(tmp_path / name) == [{"messages": messages}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}))
    (row,) = values_of(tmp_path / "a.jsonl")
    assert row["messages"][0]["content"] is None


BAD_MESSAGES: list[tuple[Any, str, str]] = [
    ("hi", "E-DATA-071", "messages"),
    (None, "E-DATA-071", "messages"),
    ([], "E-DATA-063", "messages"),
    (CHAT[:1], "E-DATA-063", "messages"),
    ([CHAT[0], {"role": "assistant", "content": " \n"}], "E-DATA-063", "messages"),
    ([*CHAT, "x"], "E-DATA-071", "messages[2]"),
    ([{"role": "user"}, *CHAT], "E-DATA-064", "messages[0]"),
    ([{"content": "x"}, *CHAT], "E-DATA-064", "messages[0]"),
    ([{"role": 1, "content": "x"}, *CHAT], "E-DATA-071", "messages[0].role"),
    ([{"role": "user", "content": None}, *CHAT], "E-DATA-071", "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}, *CHAT], "E-DATA-123", "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}, *CHAT], "E-DATA-071", "messages[0].content[0].text"),
    ([{"role": "user", "content": ["x"]}, *CHAT], "E-DATA-123", "messages[0].content[0]"),
    ([{"role": "assistant", "content": None}, *CHAT], "E-DATA-071", "messages[0].content"),
    ([{"role": "user", "content": "\ud83d"}, *CHAT], "E-DATA-069", "messages[0].content"),
    ([{"role": "user", "content": "x", "name": ["\udc00"]}, *CHAT], "E-DATA-069", "messages[0].name"),
]


@pytest.mark.parametrize(("value", "code", "where"), BAD_MESSAGES)
def test_bad_messages_are_told_and_passed_over(tmp_path: Path, value: Any, code: str, where: str) -> None:
    bad = bad_of(tmp_path / "a.jsonl", {"messages": value}, {"messages": CHAT})
    assert bad.code == code
    assert where in bad.what


@pytest.mark.parametrize(
    ("row", "code", "where"),
    [
        ({"prompt": "a"}, "E-DATA-024", "completion"),
        ({"prompt": "a", "completion": ""}, "E-DATA-070", "completion"),
        ({"prompt": 1, "completion": "b"}, "E-DATA-071", "prompt"),
        ({"prompt": "a", "completion": ["b"]}, "E-DATA-071", "completion"),
    ],
)
def test_bad_prompts_and_completions_are_told(tmp_path: Path, row: dict[str, Any], code: str, where: str) -> None:
    bad = bad_of(tmp_path / "a.jsonl", row, {"prompt": "a", "completion": "b"})
    assert bad.code == code
    assert where in bad.what


@pytest.mark.parametrize(
    ("row", "code", "where"),
    [
        ({"input_ids": []}, "E-DATA-065", "input_ids"),
        ({"input_ids": "1 2"}, "E-DATA-071", "input_ids"),
        ({"input_ids": [1, 2.0]}, "E-DATA-071", "input_ids[1]"),
        ({"input_ids": [True]}, "E-DATA-071", "input_ids[0]"),
        ({"input_ids": [1, None]}, "E-DATA-071", "input_ids[1]"),
        ({"input_ids": [1, -1]}, "E-DATA-066", "input_ids[1]"),
        ({"input_ids": [2**31]}, "E-DATA-066", "input_ids[0]"),
        ({"input_ids": [10**3000]}, "E-DATA-066", "input_ids[0]"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "E-DATA-062", "loss_mask"),
        ({"input_ids": [1], "loss_mask": [2]}, "E-DATA-071", "loss_mask[0]"),
        ({"input_ids": [1], "loss_mask": None}, "E-DATA-071", "loss_mask"),
    ],
)
def test_bad_token_ids_are_told(tmp_path: Path, row: dict[str, Any], code: str, where: str) -> None:
    bad = bad_of(tmp_path / "a.jsonl", row, {"input_ids": [1]})
    assert bad.code == code
    assert where in bad.what
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
    with pytest.raises(UserError, match=r"'messages'.*E-DATA-052"):
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


@pytest.mark.parametrize("role", ["user", "tool", "human"])
def test_only_the_assistant_may_call_tools_without_content(tmp_path: Path, role: str) -> None:
    row = {"messages": [{"role": role, "tool_calls": [CALL]}, *CHAT]}
    bad = bad_of(tmp_path / "a.jsonl", row, {"messages": CHAT})
    assert bad.code == "E-DATA-064"
    assert "'content'" in bad.what
    assert "messages[0]" in bad.what


def test_no_error_recommends_a_column_for_the_loss_mask(tmp_path: Path) -> None:
    """`data.columns` has no role loss_mask."""
    written(tmp_path / "a.parquet", [{"input_ids": [5, 6], "loss_mask": "11"}])
    with pytest.raises(UserError) as refused:
        opened(tmp_path / "a.parquet")
    assert refused.value.code == "E-DATA-061"
    assert "loss_mask" in refused.value.what
    assert "data.columns" not in refused.value.fix
    bad = bad_of(tmp_path / "b.jsonl", {"input_ids": [1], "loss_mask": "1"}, {"input_ids": [1]})
    assert bad.code == "E-DATA-071"
    assert "data.columns" not in bad.fix


@pytest.mark.parametrize("name", ["chosen", "rejected", "prompt"])
@pytest.mark.parametrize("value", [3, None, {"role": "user", "content": "x"}])
def test_a_column_of_a_pair_is_text_or_messages(tmp_path: Path, name: str, value: Any) -> None:
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    bad = bad_of(tmp_path / "a.jsonl", good | {name: value}, good)
    assert bad.code == "E-DATA-071"
    assert f"'{name}'" in bad.what


@pytest.mark.parametrize("value", [3, None, ["a"]])
def test_a_text_is_text(tmp_path: Path, value: Any) -> None:
    assert bad_of(tmp_path / "a.jsonl", {"text": value}, {"text": "a"}).code == "E-DATA-071"
