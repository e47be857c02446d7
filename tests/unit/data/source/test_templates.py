"""Rows whose text or messages are built from columns, and formats that need no `data.columns`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from error_assertions import assert_error

from forerun.config.schema import Part
from forerun.data.source.rows import BadRow, SourceRow
from forerun.data.source.sources import Source, open_source
from forerun.errors import UserError

ROW = {"question": "2+2?", "reasoning": "Add {them}.", "answer": "4", "id": 7}
OTHER = {"question": "é", "reasoning": "", "answer": "\\n", "id": -1}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "{id}: {question}"},
    {"role": "assistant", "content": "{answer}", "reasoning_content": "{reasoning}"},
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(str(cell) for cell in row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (the data extra)")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    return path


def opened(path: Path, limit: int | None = None, **columns: Any) -> Source:
    return open_source(Part(path=str(path), columns=columns, limit=limit))


def rows_of(source: Source, piece_bytes: int = 1 << 40) -> list[SourceRow | BadRow]:
    return [row for piece in source.pieces(piece_bytes) for row in source.rows(piece)]


def values_of(source: Source, piece_bytes: int = 1 << 40) -> list[dict[str, Any]]:
    found = rows_of(source, piece_bytes)
    assert all(isinstance(row, SourceRow) for row in found), found
    return [row.values for row in found]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_text_is_built_from_columns(tmp_path: Path, name: str) -> None:
    source = opened(written(tmp_path / name, [ROW, OTHER]), text="{id} {question}\n<t>{reasoning}</t>\n{answer}{{}}")
    assert values_of(source) == [
        {"text": "7 2+2?\n<t>Add {them}.</t>\n4{}"},
        {"text": "-1 é\n<t></t>\n\\n{}"},
    ]
    assert source.recognised.endswith("columns id, question, reasoning, answer, by the template of data.columns.text")
    assert source.unused == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_messages_are_built_from_columns(tmp_path: Path, name: str) -> None:
    source = opened(written(tmp_path / name, [ROW]), messages=CHAT)
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
