"""A user's mistake, told as what happened, why, and what to do about it.

`UserError` is for what the user can mend: the command prints three lines and leaves with code 2, or with 74 where a
disk or a bucket fails.
Everything else that escapes is our bug: the command says so and leaves with code 1.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

from forerun.safe_text import clean

USER_MISTAKE = 2
STORAGE_FAILED = 74  # EX_IOERR
OUR_BUG = 1
# An OSError with one of these becomes a StorageError.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EFBIG)


class UserError(Exception):
    """Something the user can mend.

    Args:
      what: one line, what is wrong.
      why: how we know, or where it stands (file and line, device, figure).
      fix: the command or the edit that mends it.
    """

    exit_code = USER_MISTAKE

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        # Here, not where it is printed: pages, records and other processes take the parts.
        self.what, self.why, self.fix = clean(what), clean(why), clean(fix)
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = (("error", self.what), ("  why", self.why), ("  fix", self.fix))
        return "\n".join(f"{label}: {_indented(text)}" for label, text in lines)


class StorageError(UserError):
    """A disk or a bucket fails, or is full. It may be well again without anybody's doing: a supervisor waits for it."""

    exit_code = STORAGE_FAILED


def _indented(text: str) -> str:
    return text.replace("\n", "\n       ")


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to `word`, or None if nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return near[0] if near else None
