"""All error codes, with what, why and fix as the source code of forerun raises them.

The texts are read from the call that creates the error, so they cannot differ from what is printed. Codes that need
more explanation have a note in docs/reference/error-codes.md.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.error_texts import MOST_FORMS, PACKAGE, Reader, has_words, source_module

CODE = re.compile(r"E-[A-Z]+-\d{3}")
PAGE = "docs/reference/error-codes.md"
# Codes with a note on the page. A test compares them with the page, which is not part of an installation.
_NOTES = {
    "CHECKPOINT": (4, 5, 7, 14),
    "CLOUD": (16, 36, 37, 67, 69, 74, 92, 95, 105),
    "COMMAND": (7, 17),
    "DATA": (44, 68, 87, 99, 107, 170, 180, 215, 222, 226),
    "DOCTOR": (1, 2, 3, 4),
    "HARDWARE": (4, 40, 120),
    "HOSTS": (17, 23, 24, 31),
    "HUB": (2, 3, 7, 11, 16, 21, 40, 52, 53, 60, 61, 65),
    "JOB": (1, 5, 18, 20, 23, 54),
    "METHOD": (3,),
    "MODEL": (1, 6, 50),
    "PLAN": (9, 11, 19),
    "PROGRAM": (1,),
    "RUN": (13, 15, 23, 27, 30, 31, 35, 83, 88, 89, 90),
    "SYSTEM": (5,),
    "WEIGHTS": (3, 21, 32),
}
NOTES = frozenset(f"E-{area}-{number:03d}" for area, numbers in _NOTES.items() for number in numbers)
_QUOTED_CODE = re.compile(rf'"({CODE.pattern})"')
# The callers of these classes add the place to `why`: a file and a line, or the command line.
_PLACES = {
    "JobValueError": ("<place> sets <key>", ": "),
    "Mistake": ("<place>", " "),
    "_RefusedError": ("<place>", " "),
}


@dataclass(frozen=True)
class ErrorEntry:
    """An error code and every form of its texts. `<path>` stands for a value that is known only at run time."""

    code: str
    what: tuple[str, ...]
    why: tuple[str, ...]
    fix: tuple[str, ...]

    @property
    def note(self) -> str | None:
        """The address of the note with more explanation, or None if there is none."""
        return f"{PAGE}#{self.code.lower()}" if self.code in NOTES else None

    @property
    def texts(self) -> str:
        """What, why and fix as `forerun explain` prints them, with their labels."""
        return "\n".join(
            _labelled(label, forms) for label, forms in (("what", self.what), ("why", self.why), ("fix", self.fix))
        )

    def __str__(self) -> str:
        return f"{self.code}\n{self.texts}" + (f"\n note: {self.note}" if self.note else "")


def _labelled(label: str, forms: tuple[str, ...]) -> str:
    """Return a label and its forms: one after the label, several as a list."""
    lines = forms if len(forms) == 1 else ("one of", *("- " + form.replace("\n", "\n  ") for form in forms))
    return f"{label:>5}: " + "\n".join(lines).replace("\n", "\n       ")


@dataclass(frozen=True)
class RaiseSite:
    """The call in the source code that creates the error of a code."""

    code: str
    call: ast.Call
    reader: Reader

    def what(self) -> tuple[str, ...]:
        """Return the forms of the error's first text."""
        return self._forms(self.call.args[1])

    def entry(self) -> ErrorEntry:
        """Return the code with all its texts."""
        why, fix = self._keyword("why"), self._keyword("fix")
        prefix, separator = _PLACES.get(ast.unparse(self.call.func), ("", ""))
        if prefix:
            why = tuple(prefix + separator + form for form in why) or (prefix,)
        return ErrorEntry(self.code, self.what(), why, fix)

    def _keyword(self, name: str) -> tuple[str, ...]:
        return next((self._forms(keyword.value) for keyword in self.call.keywords if keyword.arg == name), ())

    def _forms(self, text: ast.expr) -> tuple[str, ...]:
        """Return the forms of a text. Forms that are only a placeholder count only if there are no others."""
        forms = [form for form in self.reader.forms(text) if form]
        forms = [form for form in forms if has_words(form)] or forms
        return (*forms[:MOST_FORMS], *(["..."] if len(forms) > MOST_FORMS else []))


def codes() -> list[str]:
    """Return all codes, without parsing the files that have them."""
    return sorted(_files_by_code())


def raise_site(code: str) -> RaiseSite:
    """Return the raise site of one of `codes()`. Its file is parsed at the first use."""
    return next(sites[code] for sites in map(raise_sites, _files_by_code()[code]) if code in sites)


def code_of(text: str) -> str:
    """Return a code as forerun writes it: `e-data-17` and `[E-DATA-017]` are E-DATA-017."""
    area, _, number = text.strip("[] ").upper().rpartition("-")
    return f"{area}-{int(number):03d}" if number.isdecimal() and len(number) <= 3 else text


@cache
def _files_by_code() -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for code in _QUOTED_CODE.findall(source_module(path).text):
            files.setdefault(code, []).append(path)
    return files


@cache
def raise_sites(path: Path) -> dict[str, RaiseSite]:
    """Return the calls of a file whose first argument is a code, or a constant with a code."""
    module, sites = source_module(path), {}
    for call, function in module.calls:
        code = call.args[0] if len(call.args) > 1 else None
        if isinstance(code, ast.Name):
            code = module.constants.get(code.id)
        if isinstance(code, ast.Constant) and CODE.fullmatch(str(code.value)):
            sites[str(code.value)] = RaiseSite(str(code.value), call, Reader(module, function))
    return sites
