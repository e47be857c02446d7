"""docs/cloud.md: every command and option exists, and the page says first what was never tried."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from forerun.cli.commands import parser_of
from forerun.cloud import cloud_checks
from forerun.config.load import load

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "cloud.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_first_paragraph_says_what_was_never_tried() -> None:
    first = PAGE.split("\n\n")[1]
    assert first.startswith("**Never tried on the real cloud.**")


def test_every_command_is_understood() -> None:
    lines = [line for kind, text in BLOCKS if kind == "sh" for line in text.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(forerun [^`]+)`", PROSE)
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("forerun ")]
    assert {name for name, *_ in commands} >= {"run", "ps", "logs", "stop", "down", "fetch", "doctor"}
    for name, *rest in commands:
        parser = parser_of(name)
        if rest:
            args = parser.read(rest)
            if getattr(args, "job", None) and str(args.job).startswith("examples/"):
                load(ROOT / args.job, args.overrides)


def test_every_option_in_a_sentence_exists() -> None:
    known = {
        option
        for name in ("run", "ps", "logs", "stop", "down", "fetch", "doctor")
        for action in parser_of(name)._actions
        for option in action.option_strings
    }
    named = {option for text in re.findall(r"`([^`]+)`", PROSE) for option in re.findall(r"--[a-z-]+", text)}
    assert named - known == set()


def test_every_option_of_gcloud_has_a_value() -> None:
    """A line that was broken or shortened would create something else."""
    lines = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line.startswith("gcloud ")]
    assert len(lines) >= 10
    for line in lines:
        line_words = shlex.split(line, comments=True)
        flags = [place for place, word in enumerate(line_words) if word in ("--member", "--role", "--location")]
        assert all(place + 1 < len(line_words) and not line_words[place + 1].startswith("--") for place in flags)


def test_every_permission_that_doctor_tests_is_named() -> None:
    tables = (
        cloud_checks.TPU_ROLES,
        cloud_checks.COMPUTE_ROLES,
        cloud_checks.ACCOUNT_ROLES,
        cloud_checks.OPTIONAL_ROLES,
    )
    wanted = {name for table in tables for role, names in table.items() for name in (role, *names)}
    assert {name for name in wanted if f"`{name}`" not in PROSE} == set()
