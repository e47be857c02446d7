"""docs/how-to/migrate/index.md has the table of names that the errors use, and an error as it is printed.

`UPDATE_DOCS=1 pytest tests/unit/config/migration/test_migration_page.py` writes the table again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from forerun.config.load import load
from forerun.config.migration.conversion import ForeignKey, ForeignValues
from forerun.config.migration.registry import GROUPS, convert_value
from forerun.config.migration.suggestion import file_lines
from forerun.config.source import flow
from forerun.errors import UserError

PAGE = Path(__file__).resolve().parents[4] / "docs" / "how-to" / "migrate" / "index.md"
BEGIN = "<!-- names: written by tests/unit/config/migration/test_migration_page.py -->\n"
END = "<!-- end of names -->"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def row(key: ForeignKey) -> str:
    names = key.names.split()
    found = convert_value(names[0], key.example, ForeignValues({names[0]: key.example}))
    assert found is not None
    here = ", ".join(f"`{line}`" for line in file_lines(found.settings)) or found.note
    cells = (", ".join(f"`{name}`" for name in names), key.tools, f"`{flow(key.example)}`", here)
    return "| " + " | ".join(map(cell, cells)) + " |"


def tables() -> str:
    head = "| names elsewhere | used by | for example | here |\n| --- | --- | --- | --- |\n"
    return "\n\n".join(f"### {group}\n\n{head}" + "\n".join(map(row, keys)) for group, keys in GROUPS.items())


def test_the_table_of_names_is_current() -> None:
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    found, after = rest.split(END)
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n\n{END}{after}", "utf-8")
    else:
        assert found.strip() == tables(), (
            f"docs/how-to/migrate/index.md differs: UPDATE_DOCS=1 pytest {Path(__file__).name}"
        )


def test_the_error_of_the_page_is_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: qwen3-0.6b\ndata: texts\n")
    ((words, text),) = re.findall(
        r"```console\n\$ forerun check job.yaml (.*?)\n(error: .*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )
    with pytest.raises(UserError) as caught:
        load(tmp_path / "job.yaml", words.split())
    assert f"{caught.value}\n" == text
