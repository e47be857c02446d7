"""Errors that a user can correct, each with a stable code.

A `UserError` says what is wrong, why, and how to correct it. Its code, such as `E-DATA-017`, never changes its meaning:
`forerun explain E-DATA-017` reads its texts from the call that raises it, and tests compare codes, not sentences. Every
other exception that reaches the command line is a bug of forerun.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from dataclasses import dataclass

from forerun.exit_codes import STORAGE_FAILED, USER_MISTAKE
from forerun.safe_text import clean

# An OSError with one of these becomes a StorageError.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EFBIG)


class UserError(Exception):
    """An error that the user can correct.

    Args:
        code: The stable name of this kind of error, `E-AREA-NUMBER`.
        what: One line that says what is wrong.
        why: The evidence, such as a file and a line, a device or a number.
        fix: The command or the edit that corrects it.
    """

    exit_code = USER_MISTAKE

    def __init__(self, code: str, what: str, *, why: str, fix: str) -> None:
        self.code = code
        # The texts are cleaned here and not when they are printed, because pages, records and other processes use them.
        self.what, self.why, self.fix = clean(what), clean(why), clean(fix)
        super().__init__(self.what)

    def __str__(self) -> str:
        first, *rest = self.what.split("\n")
        what = "\n".join([f"{first}  [{self.code}]", *rest])
        lines = (("error", what), ("  why", self.why), ("  fix", self.fix))
        return "\n".join(f"{label}: {_indented(text)}" for label, text in lines)

    def parts(self) -> dict[str, str]:
        """Return code, what, why and fix, from which another process can create the same error."""
        return {"code": self.code, "what": self.what, "why": self.why, "fix": self.fix}


@dataclass(frozen=True)
class Problem:
    """The parts of a UserError as a value, for code that reports a problem without raising it."""

    code: str
    what: str
    why: str
    fix: str

    def error(self) -> UserError:
        """Return the error of this problem."""
        return UserError(self.code, self.what, why=self.why, fix=self.fix)


class JobValueError(ValueError):
    """A value that a validator of the job's schema rejects.

    It becomes a UserError, whose `why` begins with the file, the line and the key. Python code that creates a `Job`
    sees its message in pydantic's ValidationError.
    """

    def __init__(self, code: str, what: str, *, fix: str, why: str = "") -> None:
        super().__init__(f"{what}; {fix}")
        self.code, self.what, self.why, self.fix = code, what, why, fix


class StorageError(UserError):
    """A disk or a bucket that fails or is full. It may recover, so a supervisor waits and tries again."""

    exit_code = STORAGE_FAILED


def _indented(text: str) -> str:
    return text.replace("\n", "\n       ")


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return the first line of an error's text with at most `limit` characters, or the name of its type."""
    text = error.what if isinstance(error, UserError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0][:limit]


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to `word`, or None if no word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return near[0] if near else None
