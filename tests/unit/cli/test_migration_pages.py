"""The migration pages: converted values are those of `forerun convert`, and our keys and commands exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forerun.cli.commands import COMMANDS, parser_of
from forerun.config import keys
from forerun.config.migration.registry import convert_value, leaves, surroundings
from forerun.config.migration.suggestion import file_lines
from forerun.config.source import read_value

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "migrate"
PAGES = ["axolotl", "maxtext", "torch-xla", "transformers-trainer", "trl", "v5e-sft-guide"]
CONVERTED_PAGES = ["axolotl", "transformers-trainer", "trl"]
OUTCOMES = {
    "converted": "converted",
    "not needed": "unneeded",
    "not converted": "unsupported",
    "rejected": "impossible",
}


class Row(NamedTuple):
    """A row of a table: the key or command elsewhere, the same here, and in some tables the outcome of `convert`."""

    theirs: str
    here: str
    outcome: str | None


def rows(page: str) -> list[Row]:
    found = []
    for line in (FOLDER / f"{page}.md").read_text("utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            assert len(cells) in (2, 3), line
            found.append(Row(cells[0], cells[1], cells[2] if len(cells) == 3 else None))
    return found


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def tree(lines: list[str]) -> dict[str, Any]:
    """Return lines such as `optimizer: {lr: 2e-5}` as one mapping."""
    found: dict[str, Any] = {}
    for line in lines:
        found.update(read_value(f"{{{line}}}", line))
    return found


def key_paths(value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, inner in value.items():
        path = f"{prefix}{name}"
        yield path
        section = keys.fields().get(path)
        if isinstance(inner, dict) and section is not None and keys.section_of(section):
            yield from key_paths(inner, f"{path}.")


@pytest.mark.parametrize("page", CONVERTED_PAGES)
def test_each_row_is_what_convert_does(page: str) -> None:
    checked = 0
    for row in rows(page):
        if row.outcome not in OUTCOMES:  # the head of a table, or a table of commands
            continue
        theirs = tree(code(row.theirs))
        given = surroundings(theirs)
        settings: dict[str, Any] = {}
        for name, value in leaves(theirs):
            found = convert_value(name, value, given)
            assert found is not None, f"the registry does not know {name}"
            assert found.outcome == OUTCOMES[row.outcome], (row, found)
            assert not found.lost, (row, found)
            settings.update(found.settings)
        if row.outcome == "converted":
            assert tree(code(row.here)) == tree(file_lines(settings)), row
        checked += 1
    assert checked > 40


@pytest.mark.parametrize("page", PAGES)
def test_our_keys_and_commands_exist(page: str) -> None:
    found_keys, found_commands = 0, 0
    for row in rows(page):
        for text in code(row.here):
            if text.startswith("forerun "):
                name, *rest = shlex.split(text)[1:]
                if rest:
                    parser_of(name).read(rest)
                assert name in COMMANDS
                found_commands += 1
            elif re.match(r"[a-z_]+: ", text):
                for path in key_paths(tree([text])):
                    assert path in keys.fields(), f"{path} of {row} is not a key of a job"
                    found_keys += 1
    assert found_keys > 5
    assert found_commands > 3


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_a_source_a_date_and_an_example(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text("utf-8")
    assert re.search(r"Checked against.*?20\d\d-\d\d-\d\d", text, re.DOTALL)
    assert "## What differs in meaning" in text
    assert "## What forerun does not have" in text
    assert re.search(r"^```bash\n.*?^forerun check job.yaml", text, re.DOTALL | re.MULTILINE)
    assert f"({page}.md)" in (FOLDER / "index.md").read_text("utf-8")
