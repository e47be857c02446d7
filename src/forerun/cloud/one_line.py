"""Rejection of control characters in texts that become lines of units, scripts and commands."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from forerun.errors import UserError

# Controls, lone surrogates, and the separators of lines and paragraphs.
_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")


def require_one_line(texts: Mapping[str, object]) -> None:
    """Raise UserError if a text has a line break or another control character.

    systemd, shells and YAML readers end a line at different characters, so no quoting is safe for all of them.

    Args:
      texts: texts, or lists of them, by the name that the error mentions. Other values are ignored.
    """
    for name, value in texts.items():
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and any(unicodedata.category(letter) in _CATEGORIES for letter in text):
                raise UserError(
                    "E-CLOUD-110",
                    f"{name}: {text!a} has a control character",
                    why="the text becomes part of a unit, a script or a command line, where it could begin a new line",
                    fix="remove the line break or the control character; a long text belongs in the job file",
                )
