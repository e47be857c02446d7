"""The code blocks of a page: their language, title and text, and why a block is not run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"(?P<notes>(?:^ *<!-- (?:not run|run with|run first): [^\n]*? -->\n\n?)*)"
    r"^(?P<indent> *)(?P<ticks>```+) *(?P<language>[\w-]*)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)(?P=ticks) *$",
    re.MULTILINE | re.DOTALL,
)
SHELL = ("bash", "sh")
RUN = (*SHELL, "console", "python", "yaml", "json")


@dataclass(frozen=True)
class Block:
    """A fenced block, with the comments before it.

    `reason` says why it is not run, `overrides` are added to its commands, and `first` are commands to run before it.
    """

    line: int
    language: str
    title: str | None
    text: str
    reason: str | None
    overrides: tuple[str, ...]
    first: tuple[str, ...]

    @property
    def is_run(self) -> bool:
        """Whether the block has code that must run: output and included files have none."""
        return self.reason is None and self.language in RUN and not self.text.startswith("--8<--")

    def commands(self) -> list[str]:
        """Return the commands of a shell block, or those after a prompt of a console block."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif self.language not in SHELL:
            return []
        return [line.strip() for line in lines if shlex.split(line, comments=True)]

    def expected_errors(self) -> dict[str, str]:
        """Return the error code that each command of a console block prints, if it prints one."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:] if self.language == "console" else []
        found = ((part.partition("\n")[0].strip(), re.search(r"\[(E-[A-Z]+-\d+)\]", part)) for part in parts)
        return {command: code[1] for command, code in found if code}


def blocks_of(page: Path) -> list[Block]:
    """Return all code blocks of a page, in order."""
    text = page.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["info"])
        notes = re.findall(r"<!-- (not run|run with|run first): (.*?) -->", match["notes"])
        found.append(
            Block(
                line=text[: match.start("ticks")].count("\n") + 1,
                language=match["language"],
                title=title[1] if title else None,
                text=re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
                reason=next((note for kind, note in notes if kind == "not run"), None),
                overrides=tuple(word for kind, note in notes if kind == "run with" for word in shlex.split(note)),
                first=tuple(note for kind, note in notes if kind == "run first"),
            )
        )
    return found
