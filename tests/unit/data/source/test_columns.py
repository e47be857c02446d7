"""The form of rows and the values of their columns, by name or by a template."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from error_assertions import assert_error, raises_error

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


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(str(cell) for cell in row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (the data extra)")
        table = arrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            with arrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
    return path


def opened(path: Path, limit: int | None = None, **columns: Any) -> Source:
    return open_source(Part(path=str(path), columns=columns, limit=limit))


def rows_of(source: Source, piece_bytes: int = 1 << 40) -> list[SourceRow | BadRow]:
    return [row for piece in source.pieces(piece_bytes) for row in source.rows(piece)]


def values_of(source: Source, piece_bytes: int = 1 << 40) -> list[dict[str, Any]]:
    found = rows_of(source, piece_bytes)
    assert all(isinstance(row, SourceRow) for row in found), found
    return [row.values for row in found]  # type: ignore[union-attr]


def bad_of(path: Path, row: dict[str, Any], good: dict[str, Any], **columns: str) -> BadRow:
    """The one bad row, written between two good ones."""
    path.write_text("".join(json.dumps(each) + "\n" for each in (good, row, good)))
    first, bad, last = rows_of(opened(path, **columns))
    assert isinstance(first, SourceRow)
    assert isinstance(last, SourceRow)
    assert isinstance(bad, BadRow)
    assert bad.place == (str(path), 2, "line")
    return bad


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_recognised_and_gives_back_what_was_written(tmp_path: Path, name: str, form: str) -> None:
    written(tmp_path / name, [{"id": 1, **row} for row in FORMS[form]])
    assert opened(tmp_path / name).form == form
    assert values_of(opened(tmp_path / name)) == FORMS[form]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_may_have_columns_of_other_names(tmp_path: Path, name: str, form: str) -> None:
    roles = [role for role in FORMS[form][0] if role != "prompt" or form == "prompt/completion"]
    rows = [{(f"my {role}" if role in roles else role): held for role, held in row.items()} for row in FORMS[form]]
    written(tmp_path / name, rows)
    assert values_of(opened(tmp_path / name, **{role: f"my {role}" for role in roles})) == FORMS[form]
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
    (row,) = values_of(opened(tmp_path, messages="conversations"))
    roles = ["system", "user", "assistant", "tool"]
    assert row == {"messages": [{"role": role, "content": said[at][1]} for at, role in enumerate(roles)]}


@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
@pytest.mark.parametrize(("asks", "answers"), [("human", "gpt"), ("human", "bot"), ("user", "chatgpt")])
def test_other_names_of_the_roles_are_known(tmp_path: Path, keys: tuple[str, str], asks: str, answers: str) -> None:
    said = [("system", "be kind"), (asks, "hi"), (answers, "hello")]
    written(tmp_path / "a.jsonl", [{"messages": [dict(zip(keys, one, strict=True)) for one in said]}])
    (row,) = values_of(opened(tmp_path))
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
        assert values_of(opened(tmp_path / name)) == [{"messages": messages}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}))
    (row,) = values_of(opened(tmp_path / "a.jsonl"))
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


QUESTION, PAIR = {"prompt": "a", "completion": "b"}, {"prompt": "p", "chosen": "a", "rejected": "b"}
BAD_VALUES: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [  # a good row, a bad one, its error
    *(({"messages": CHAT}, {"messages": value}, code, where) for value, code, where in BAD_MESSAGES),
    *(
        ({"messages": CHAT}, {"messages": [{"role": role, "tool_calls": [CALL]}, *CHAT]}, "E-DATA-064", "'content'")
        for role in ("user", "tool", "human")  # only the assistant may call tools without content
    ),
    *(({"text": "a"}, {"text": value}, "E-DATA-071", "text") for value in (3, None, ["a"])),
    (QUESTION, {"prompt": "a"}, "E-DATA-024", "completion"),
    (QUESTION, {"prompt": "a", "completion": ""}, "E-DATA-070", "completion"),
    (QUESTION, {"prompt": 1, "completion": "b"}, "E-DATA-071", "prompt"),
    (QUESTION, {"prompt": "a", "completion": ["b"]}, "E-DATA-071", "completion"),
    *(
        (PAIR, PAIR | {name: value}, "E-DATA-071", f"'{name}'")
        for name in PAIR
        for value in (3, None, {"role": "user", "content": "x"})
    ),
    ({"input_ids": [1]}, {"input_ids": []}, "E-DATA-065", "input_ids"),
    ({"input_ids": [1]}, {"input_ids": "1 2"}, "E-DATA-071", "input_ids"),
    ({"input_ids": [1]}, {"input_ids": [1, 2.0]}, "E-DATA-071", "input_ids[1]"),
    ({"input_ids": [1]}, {"input_ids": [True]}, "E-DATA-071", "input_ids[0]"),
    ({"input_ids": [1]}, {"input_ids": [1, None]}, "E-DATA-071", "input_ids[1]"),
    ({"input_ids": [1]}, {"input_ids": [1, -1]}, "E-DATA-066", "input_ids[1]"),
    ({"input_ids": [1]}, {"input_ids": [2**31]}, "E-DATA-066", "input_ids[0]"),
    ({"input_ids": [1]}, {"input_ids": [10**3000]}, "E-DATA-066", "input_ids[0]"),
    ({"input_ids": [1]}, {"input_ids": [1, 2], "loss_mask": [1]}, "E-DATA-062", "loss_mask"),
    ({"input_ids": [1]}, {"input_ids": [1], "loss_mask": [2]}, "E-DATA-071", "loss_mask[0]"),
    ({"input_ids": [1]}, {"input_ids": [1], "loss_mask": None}, "E-DATA-071", "loss_mask"),
]


@pytest.mark.parametrize(("good", "row", "code", "where"), BAD_VALUES)
def test_bad_values_are_named_and_skipped(
    tmp_path: Path, good: dict[str, Any], row: dict[str, Any], code: str, where: str
) -> None:
    bad = bad_of(tmp_path / "a.jsonl", row, good)
    assert bad.code == code
    assert where in bad.what
    assert len(bad.why) < 200


def test_a_loss_mask_comes_along(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", [{"input_ids": [5, 6], "loss_mask": [False, 1]}, {"input_ids": [7]}])
    assert values_of(opened(tmp_path / "a.jsonl")) == [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [7]}]
    written(tmp_path / "b.parquet", [{"input_ids": [5, 6], "loss_mask": [False, True]}])
    assert values_of(opened(tmp_path / "b.parquet")) == [{"input_ids": [5, 6], "loss_mask": [0, 1]}]


def test_csv_carries_prompts_and_no_lists(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,answer,prompt\n1,b,a\n")
    assert values_of(opened(tmp_path / "a.csv", completion="answer")) == [{"prompt": "a", "completion": "b"}]
    (tmp_path / "b.csv").write_text('messages\n"[]"\n')
    with raises_error("E-DATA-052", "'messages'"):
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


# ---- Templates, and formats that need no `data.columns` ----

ROW = {"question": "2+2?", "reasoning": "Add {them}.", "answer": "4", "id": 7}
OTHER_ROW = {"question": "é", "reasoning": "", "answer": "\\n", "id": -1}
CHAT_TEMPLATE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "{id}: {question}"},
    {"role": "assistant", "content": "{answer}", "reasoning_content": "{reasoning}"},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_text_is_built_from_columns(tmp_path: Path, name: str) -> None:
    source = opened(
        written(tmp_path / name, [ROW, OTHER_ROW]), text="{id} {question}\n<t>{reasoning}</t>\n{answer}{{}}"
    )
    assert values_of(source) == [
        {"text": "7 2+2?\n<t>Add {them}.</t>\n4{}"},
        {"text": "-1 é\n<t></t>\n\\n{}"},
    ]
    assert source.recognised.endswith("columns id, question, reasoning, answer, by the template of data.columns.text")
    assert source.unused == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_messages_are_built_from_columns(tmp_path: Path, name: str) -> None:
    source = opened(written(tmp_path / name, [ROW]), messages=CHAT_TEMPLATE)
    assert source.form == "messages"
    assert values_of(source) == [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "7: 2+2?"},
                {"role": "assistant", "content": "4", "reasoning_content": "Add {them}."},
            ]
        }
    ]


def test_each_role_can_be_a_template(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [ROW])
    pair = values_of(opened(path, chosen="{answer}!", rejected="{reasoning}", prompt="Q: {question}"))
    assert pair == [{"chosen": "4!", "rejected": "Add {them}.", "prompt": "Q: 2+2?"}]
    source = opened(path, prompt="question", completion="<t>{reasoning}</t>{answer}")
    assert values_of(source) == [{"prompt": "2+2?", "completion": "<t>Add {them}.</t>4"}]
    assert source.unused == ["id"]
    assert Source.from_json(json.dumps(source.to_json())).columns == source.columns


def test_an_unknown_column_lists_the_columns_of_the_file(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        path = written(tmp_path / name, [ROW])
        with pytest.raises(UserError) as caught:
            opened(path, text="{question}{reason}")
        assert_error(
            caught.value, "E-DATA-120", what="'reason'", why="question, reasoning, answer, id", fix="{reasoning}"
        )
    with pytest.raises(UserError) as caught:
        opened(path, text="{question.__class__}")
    assert_error(caught.value, "E-DATA-120", what="question.__class__")


@pytest.mark.parametrize("cell", [None, ..., 1.5, True, ["a"], {"a": 1}])
def test_a_cell_that_is_no_text_is_a_bad_row(tmp_path: Path, cell: object) -> None:
    row = {key: value for key, value in (ROW | {"reasoning": cell}).items() if value is not ...}
    path = written(tmp_path / "a.jsonl", [ROW, row, ROW])
    first, bad, last = rows_of(opened(path, text="{question} {reasoning}"))
    assert isinstance(bad, BadRow)
    assert (bad.code, bad.place.number) == ("E-DATA-121", 2)
    assert "'reasoning'" in bad.what
    assert first.values == last.values == {"text": "2+2? Add {them}."}  # type: ignore[union-attr]


def test_an_empty_result_is_a_bad_row_and_a_column_type_is_checked(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [ROW, ROW | {"reasoning": " "}])
    assert [getattr(row, "code", "") for row in rows_of(opened(path, text="{reasoning}"))] == ["", "E-DATA-070"]
    lists = written(tmp_path / "b.parquet", [{"a": "x", "b": [1]}])
    with pytest.raises(UserError) as caught:
        opened(lists, text="{a}{b}")
    assert_error(caught.value, "E-DATA-061", what="'b'", fix="{b}")


def test_a_template_rejects_two_columns_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a,a\n1,2,3\n")
    with pytest.raises(UserError) as caught:
        opened(tmp_path / "a.csv", text="{q}{a}")
    assert_error(caught.value, "E-DATA-023", what="'a'")


def test_a_content_that_is_the_name_of_a_column_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [ROW])
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "{answer}"}]
    with pytest.raises(UserError) as caught:
        opened(path, messages=chat)
    assert_error(caught.value, "E-DATA-122", what="'question'", fix='"{question}"')
    assert values_of(opened(path, messages=[{"role": "user", "content": "Add."}, chat[1]]))


def test_a_proposed_fix_names_every_column_that_it_does_not_use(tmp_path: Path) -> None:
    for code, row in (
        ("E-DATA-225", ROW),
        ("E-DATA-225", {"question": "a", "context": "b", "answer": "c", "source": "d"}),
        ("E-DATA-024", {"txt": "a", "lang": "b"}),
        ("E-DATA-225", {"prompt": "", "reply": "", "remark": "", "score": 1}),
    ):
        with pytest.raises(UserError) as caught:
            opened(written(tmp_path / "a.jsonl", [row]))
        assert caught.value.code == code
        assert all(name in caught.value.fix for name in row), caught.value.fix
    # The proposal works as it is written.
    with pytest.raises(UserError) as caught:
        opened(written(tmp_path / "a.jsonl", [ROW]))
    assert "data.columns.prompt=question" in caught.value.fix
    template = caught.value.fix.partition('data.columns.completion="')[2].partition('"')[0]
    assert values_of(opened(tmp_path / "a.jsonl", prompt="question", completion=template))[0]["completion"] == (
        "<think>Add {them}.</think>4"
    )


ALPACA = [
    {"instruction": "Sort.", "input": "b a", "output": "a b"},
    {"instruction": "Greet.", "input": "", "output": "Hi"},
    {"instruction": "Greet.", "input": None, "output": "Hi"},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_alpaca_rows_need_no_columns(tmp_path: Path, name: str) -> None:
    source = opened(written(tmp_path / name, ALPACA))
    assert source.form == "alpaca"
    assert source.recognised == f"1 file, {name[2:]}, Alpaca, columns instruction, input, output"
    assert values_of(source) == [ALPACA[0], ALPACA[1], ALPACA[1]]
    assert values_of(opened(written(tmp_path / "c.csv", ALPACA[:2]))) == ALPACA[:2]
    both = opened(written(tmp_path / "t.jsonl", [ALPACA[0] | {"text": "x"}]))
    assert both.form == "text"
    assert opened(tmp_path / "t.jsonl", instruction="instruction").form == "alpaca"


def test_alpaca_rows_may_have_no_input_and_need_an_output(tmp_path: Path) -> None:
    rows = [
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "output": " "},
        {"instruction": "a", "input": 1, "output": "b"},
    ]
    good, *bad = rows_of(opened(written(tmp_path / "a.jsonl", rows)))
    assert isinstance(good, SourceRow)
    assert good.values == {"instruction": "a", "output": "b"}
    assert [row.code for row in bad] == ["E-DATA-070", "E-DATA-071"]  # type: ignore[union-attr]
    renamed = opened(
        written(tmp_path / "b.jsonl", [{"task": "a", "context": "c", "output": "b"}]),
        instruction="task",
        input="context",
    )
    assert values_of(renamed) == [{"instruction": "a", "input": "c", "output": "b"}]


SHAREGPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "q"},
    {"from": "gpt", "value": "a"},
    {"from": "tool", "value": "t"},
    {"from": "gpt", "value": "b"},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("column", ["conversations", "conversation", "messages"])
def test_sharegpt_rows_need_no_columns(tmp_path: Path, name: str, column: str) -> None:
    source = opened(written(tmp_path / name, [{"id": "1", column: SHAREGPT}]))
    assert source.recognised == f"1 file, {name[2:]}, chat (ShareGPT), column {column}"
    (values,) = values_of(source)
    assert [one["role"] for one in values["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert [one["content"] for one in values["messages"]] == list("sqatb")
    assert source.columns == ({} if column == "messages" else {"messages": column})


PROMPT = [{"role": "user", "content": "q"}]
ANSWER = [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_prompts_and_completions_may_be_messages(tmp_path: Path, name: str) -> None:
    source = opened(written(tmp_path / name, [{"prompt": PROMPT, "completion": ANSWER}]))
    assert source.form == "prompt/completion messages"
    assert values_of(source) == [{"prompt": PROMPT, "completion": ANSWER}]
    texts = opened(written(tmp_path / f"t{name}", [{"prompt": "q", "completion": ANSWER}]))
    assert texts.form == "prompt/completion messages"
    if name == "a.jsonl":
        bad = rows_of(
            opened(written(tmp_path / name, [{"prompt": PROMPT, "completion": one} for one in (ANSWER, PROMPT, "")]))
        )
        assert [getattr(row, "code", "") for row in bad] == ["", "E-DATA-063", "E-DATA-070"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_text_parts_are_joined_and_other_parts_are_named(tmp_path: Path, name: str) -> None:
    def chat(*parts: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": [text("a")]}]}

    def text(content: str) -> dict[str, Any]:
        return {"type": "text", "text": content}

    image = {"type": "image", "text": None}
    good, bad = rows_of(opened(written(tmp_path / name, [chat(text("b "), text("c")), chat(text("b"), image)])))
    assert isinstance(good, SourceRow)
    assert [one["content"] for one in good.values["messages"]] == ["b c", "a"]
    assert isinstance(bad, BadRow)
    assert bad.code == "E-DATA-123"
    assert "messages[0].content[1]" in bad.what
    assert "'image'" in bad.what


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
@pytest.mark.parametrize("limit", [1, 7, 20, 21, 40, 99])
def test_a_limit_reads_the_first_rows_and_only_the_files_that_hold_them(tmp_path: Path, name: str, limit: int) -> None:
    rows = [{"text": f"row {number}"} for number in range(40)]
    for part in (0, 1):
        written(tmp_path / f"{part}{name}", rows[20 * part : 20 * part + 20])
    source = opened(tmp_path, limit)
    assert [one["text"] for one in values_of(source, 50)] == [row["text"] for row in rows[:limit]]
    assert len(source.files) == (1 if limit <= 20 else 2)
    again = Source.from_json(json.dumps(source.to_json()))
    assert values_of(again, 50) == values_of(source, 50)
    assert source.recognised.endswith(f", the first {limit} rows")


def test_a_limit_counts_bad_rows_and_documents_between_separators(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\nno json\n{"text": "b"}\n{"text": "c"}\n')
    assert [type(row) for row in rows_of(opened(tmp_path / "a.jsonl", 3), 8)] == [SourceRow, BadRow, SourceRow]
    (tmp_path / "b.txt").write_text("one|two|three|four")
    parts = open_source(Part(path=str(tmp_path / "b.txt"), separator="|", limit=3))
    assert [one["text"] for one in values_of(parts, 5)] == ["one", "two", "three"]
