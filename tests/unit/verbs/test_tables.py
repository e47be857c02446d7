"""Tables of the API."""

from __future__ import annotations

import pytest

from forerun.verbs.table import Table


def test_columns_and_rows() -> None:
    table = Table([{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0, "validation_loss": 2.25}])
    assert table.columns == ["step", "loss", "validation_loss"]
    assert (table["loss"], table["validation_loss"]) == ([2.5, 2.0], [None, 2.25])
    assert (len(table), next(iter(table))) == (2, {"step": 1, "loss": 2.5})
    with pytest.raises(KeyError, match="loss, validation_loss"):
        table["los"]


def test_a_long_table_is_shortened_and_escaped() -> None:
    table = Table({"step": n, "text": "<b>"} for n in range(100))
    html = table._repr_html_()
    assert html.count("<tr>") == 12
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert repr(table).splitlines()[0].split() == ["step", "text"]
    assert len(repr(table).splitlines()) == 12


def test_an_empty_table() -> None:
    assert (len(Table([])), Table([]).columns) == (0, [])
    assert repr(Table([])) == ""
