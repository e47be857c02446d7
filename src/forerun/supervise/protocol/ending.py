"""The end of a job, which the leader sends to all hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from forerun.errors import StorageError, UserError
from forerun.exit_codes import STORAGE_FAILED


@dataclass(frozen=True)
class Ending:
    """The end of a job: the exit code of all hosts, and a text for the user.

    `error`, `what`, `why` and `fix` are the parts of a UserError. They are empty if the user cannot correct the cause.
    """

    kind: ClassVar[str] = "over"
    code: int
    text: str = ""
    error: str = ""  # the error code, such as E-HOSTS-001
    what: str = ""
    why: str = ""
    fix: str = ""
    host: int = -1  # the host whose worker has already printed the cause

    @classmethod
    def mistake(cls, error: UserError) -> Self:
        """Return the end of a job that cannot run because of `error`."""
        return cls(error.exit_code, "", error.code, error.what, error.why, error.fix)

    def exit_code(self) -> int:
        """Return the exit code. Raise UserError or StorageError if the user can correct the cause."""
        if self.what:
            kind = StorageError if self.code == STORAGE_FAILED else UserError
            raise kind(self.error, self.what, why=self.why, fix=self.fix)
        return self.code
