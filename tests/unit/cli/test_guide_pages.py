"""The pages about the guides and about migration: every command is understood, and every job loads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forerun.cli.commands import COMMANDS, parser_of
from forerun.config.load import load

ROOT = Path(__file__).resolve().parents[3]
GUIDES = ["multi-device", "pretrain-3b", "qat-recovery", "sft-v5e", "tinystories-reservoir"]
PAGES = [
    *(ROOT / "docs" / "tutorials" / "guides" / f"{name}.md" for name in ["index", *GUIDES]),
    ROOT / "docs" / "how-to" / "migrate" / "index.md",
]
OFFICIAL = ("cloud.google.com", "docs.jax.dev", "openxla.org", "huggingface.co/docs")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """The words of each `forerun` command, in blocks and inside of sentences, without redirections."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(forerun [^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE))
    found = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines if line.startswith("forerun ")]
    return [command[1:] for command in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_understood(page: Path) -> None:
    found = commands(page.read_text("utf-8"))
    assert len(found) > 1
    for name, *rest in found:
        assert name in COMMANDS
        if not rest:  # the name of a command in a sentence
            continue
        args = parser_of(name).read(rest)
        if getattr(args, "job", "").startswith(("bench/", "examples/")):
            load(ROOT / args.job, args.overrides)


@pytest.mark.parametrize("name", GUIDES)
def test_every_job_of_a_guide_loads(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "guides" / f"{name}.md").read_text("utf-8")
    jobs = re.findall(r'^```yaml title="(\w+\.yaml)"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    assert jobs
    for file, text in jobs:
        (tmp_path / file).write_text(text)
        load(tmp_path / file)
    for command, *rest in commands(page):
        if rest and (tmp_path / rest[0]).is_file() and command in ("check", "plan", "train", "cache", "data"):
            load(tmp_path / rest[0], parser_of(command).read(rest).overrides)


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_has_steps_corrections_and_official_links(name: str) -> None:
    page = (ROOT / "docs" / "tutorials" / "guides" / f"{name}.md").read_text("utf-8")
    parts = re.split(r"^## ", page, flags=re.MULTILINE)
    titles = [part.partition("\n")[0] for part in parts[1:]]
    assert {"Step by step", "Corrections", "Links"} <= set(titles)
    addresses = re.findall(r"\(https://([^)]+)\)", page)
    assert addresses
    assert all(address.startswith(OFFICIAL) for address in addresses)
    assert "(index.md)" in page


def test_the_navigation_has_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in PAGES:
        assert f" {page.relative_to(ROOT / 'docs')}\n" in navigation
