"""The formats of docs/how-to/data.md, and how their rows become text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forerun.config.schema import Data, Part
from forerun.data.corpus import applies_template
from forerun.data.source.columns import FORMS
from forerun.data.source.rows import SourceRow
from forerun.data.source.sources import open_source

PAGE = (Path(__file__).resolve().parents[3] / "docs/how-to/data.md").read_text()
TABLE = PAGE.partition("<!-- formats:")[2].partition("<!-- end of formats -->")[0]
FORMATS = re.findall(r"^\| `([^`]+)`( \(ShareGPT\))? \| `(\{.*\})` \|", TABLE, re.M)


def test_the_page_has_every_form() -> None:
    assert {form for form, _, _ in FORMATS} == set(FORMS)


@pytest.mark.parametrize(("form", "style", "row"), FORMATS)
def test_the_examples_of_the_page_are_read_as_it_says(form: str, style: str, row: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(row)
    source = open_source(Part(path=str(tmp_path / "a.jsonl")))
    assert source.form == form
    assert ("ShareGPT" in source.recognised) == bool(style)
    assert source.unused == []
    (found,) = source.rows(source.pieces(1 << 20)[0])
    assert isinstance(found, SourceRow), found
    if not style:
        assert found.values == json.loads(row)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize("template", [None, "model", "job"])
def test_prompts_become_messages_if_there_is_a_template(form: str, wanted: bool | None, template: str | None) -> None:
    data = Data(path="a", apply_template=wanted, chat_template="chatml" if template == "job" else None)
    applied = applies_template(form, data, "{{ messages }}" if template == "model" else None)
    if form in ("prompt/completion", "alpaca"):
        assert applied == (template is not None if wanted is None else wanted)
    else:
        assert applied == (wanted is True and form == "chosen/rejected")
