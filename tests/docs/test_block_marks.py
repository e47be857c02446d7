"""Blocks that are not run have a reason and valid commands, and the runner of blocks finds each kind of failure."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest
from code_blocks import blocks_of
from page_runner import BlockError, run_block, run_page

from forerun.cli.commands import COMMANDS, parser_of
from forerun.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(path for kind in ("tutorials", "how-to") for path in (ROOT / "docs" / kind).rglob("*.md")),
    ROOT / "docs" / "gpu.md",
]
MARKED = [(page, block) for page in PAGES for block in blocks_of(page) if block.reason is not None]
LANGUAGES = {"bash", "sh", "console", "python", "yaml", "json", "text", "toml", "jinja", ""}
MAX_MARKED_SHARE = 0.5


def page_with(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, "utf-8")
    return page


def test_most_blocks_are_run() -> None:
    run = sum(block.is_run for page in PAGES for block in blocks_of(page))
    print(f"{run} blocks are run, {len(MARKED)} are not:")
    for page, block in MARKED:
        print(f"{page.relative_to(ROOT)}:{block.line}: {block.reason}")
    assert len(MARKED) / (run + len(MARKED)) < MAX_MARKED_SHARE


@pytest.mark.parametrize(("page", "block"), MARKED, ids=lambda part: getattr(part, "stem", None) or str(part.line))
def test_a_block_that_is_not_run_is_understood(page: Path, block) -> None:  # type: ignore[no-untyped-def]
    assert len(block.reason.split()) > 2
    for command in block.commands():
        name, *rest = shlex.split(command.partition(" > ")[0].rstrip("& "), comments=True)
        if name == "forerun":
            assert rest[0] in COMMANDS
            parser_of(rest[0]).read(rest[1:])


def test_every_language_is_known() -> None:
    """A misspelt language would not be run."""
    assert {block.language for page in PAGES for block in blocks_of(page)} <= LANGUAGES


def test_the_comments_before_a_block_are_read(tmp_path: Path) -> None:
    text = "<!-- not run: needs a moon -->\n```sh\nfly\n```\n\n<!-- run first: a b -->\n"
    text += "<!-- run with: x=1 'y={z: 2}' -->\n"
    text += (
        '```console title="t"\n$ one \\\n  two  # three\nprinted\n$ four\nerror [E-JOB-001]\n```\n\n```sh\nfive\n```\n'
    )
    first, second, third = blocks_of(page_with(tmp_path, text))
    assert (first.reason, first.is_run, first.line) == ("needs a moon", False, 2)
    assert (second.first, second.overrides, second.title) == (("a b",), ("x=1", "y={z: 2}"), "t")
    assert second.commands() == ["one    two  # three", "four"]
    assert second.expected_errors() == {"four": "E-JOB-001"}
    assert (third.reason, third.is_run, third.commands()) == (None, True, ["five"])


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```sh\ntrue\nfalse\n```", BlockError),
        ("```console\n$ forerun explain E-NONE-001\nfound\n```", BlockError),
        ("```console\n$ forerun check part.yaml\nerror [E-JOB-018]\n```", BlockError),
        ("```python\nassert 1 == 2\n```", AssertionError),
        ("```json\n{'a': 1}\n```", json.JSONDecodeError),
        ("```yaml\nstep: 3\n```", UserError),
    ],
)
def test_a_block_that_fails_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str, error: type[Exception]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.yaml").write_text("model: {layers: 1, embed: 16, heads: 2}\ndata: texts\nsteps: 2\n")
    (found,) = blocks_of(page_with(tmp_path, block))
    with pytest.raises(error):
        run_block(found, {})


def test_blocks_of_a_page_share_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "```python\nimport pathlib\nnumber = 41\n```\n```sh\necho 1 > one\n```\n"
    text += "```python\nassert pathlib.Path('one').read_text() == '1\\n'\n```\n"
    text += "```python\nassert number == 41 and fr.load_job\n```\n```python\nassert number == 42\n```\n"
    report = io.StringIO()
    run_page(page_with(tmp_path, text), tmp_path / "work", tmp_path / "tiny", report)
    problems = [json.loads(line)["problem"] for line in report.getvalue().splitlines()]
    assert [problem is None for problem in problems] == [True, True, True, True, False]
    assert "number == 42" in problems[-1] or "AssertionError" in problems[-1]
