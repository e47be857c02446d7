"""Templates of columns: the grammar, and the mistakes that a job can contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.config.column_template import parse_template
from forerun.config.load import load
from forerun.errors import UserError


@pytest.mark.parametrize(
    ("text", "texts", "columns"),
    [
        ("content", ["content"], []),
        ("{a}", ["", ""], ["a"]),
        ("{a}{b} {a}\n", ["", "", " ", "\n"], ["a", "b", "a"]),
        ("{{a}}", ["{a}"], []),
        ("{{{a}}}", ["{", "}"], ["a"]),
        ('{{"k": "{my column}"}}', ['{"k": "', '"}'], ["my column"]),
        # Nothing between the braces is a program: it is always the name of a column.
        ("{a.__class__}{a[0]}{a!r}{a:>9}{0}", [""] * 6, ["a.__class__", "a[0]", "a!r", "a:>9", "0"]),
    ],
)
def test_a_template_is_texts_and_columns(text: str, texts: list[str], columns: list[str]) -> None:
    found = parse_template(text)
    assert (list(found.texts), list(found.columns)) == (texts, columns)


@pytest.mark.parametrize("text", ["{", "}", "{a", "a}", "{}", "{a}}", "{{a}", "{a{b}}"])
def test_a_single_brace_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="character"):
        parse_template(text)


JOB = "model: qwen3-0.6b\ndata:\n  path: rows.jsonl\n  columns: {columns}\n"
ANSWER = '{role: assistant, content: "{a}"}'


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ('{text: "{question"}', "E-JOB-064"),
        ("{text: {question}}", "E-JOB-060"),
        ("{text: [question]}", "E-JOB-061"),
        ('{input_ids: "{ids}"}', "E-JOB-065"),
        ('{messages: "{rows}"}', "E-JOB-065"),
        ("{messages: []}", "E-JOB-063"),
        ("{messages: [question, answer]}", "E-JOB-062"),
        ('{messages: [{role: user, content: "{q}"}]}', "E-JOB-063"),
        ('{messages: [{role: user, content: "{q}"}, {role: assistant, content: fixed}]}', "E-JOB-063"),
        ('{messages: [{content: "{q}"}, ' + ANSWER + "]}", "E-JOB-062"),
        ("{messages: [{role: user}, " + ANSWER + "]}", "E-JOB-062"),
        ("{messages: [{role: user, content: 7}, " + ANSWER + "]}", "E-JOB-062"),
        ('{messages: [{role: user, content: "}"}, ' + ANSWER + "]}", "E-JOB-064"),
        ("{text: 7}", "E-JOB-020"),
        ("{txet: a}", "E-JOB-025"),
    ],
)
def test_mistakes_in_columns_are_named(columns: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("{columns}", columns))
    with pytest.raises(UserError) as caught:
        load(tmp_path / "job.yaml")
    assert caught.value.code == code, caught.value
    assert "job.yaml:" in caught.value.why


def test_columns_can_be_templates_also_on_the_command_line_and_in_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        'model: qwen3-0.6b\ndata:\n  mixture:\n    a: {path: a.jsonl, limit: 9, columns: {text: "{q}\\n{a}"}}\n'
        '    b:\n      path: b.jsonl\n      columns:\n        messages:\n          - {role: user, content: "{q}"}\n'
        "          - " + ANSWER + "\n"
    )
    parts = load(tmp_path / "job.yaml").job.data.parts
    assert parts["a"].columns == {"text": "{q}\n{a}"}
    assert parts["a"].limit == 9
    assert parts["b"].columns["messages"][1] == {"role": "assistant", "content": "{a}"}
    (tmp_path / "one.yaml").write_text("model: qwen3-0.6b\ndata: rows.jsonl\n")
    one = load(tmp_path / "one.yaml", ['data.columns.prompt="{q}"', "data.limit=3"]).job.data
    assert one.parts["data"].columns == {"prompt": "{q}"}
    assert one.parts["data"].limit == 3
