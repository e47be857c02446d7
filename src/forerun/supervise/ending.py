"""How a job ended, as all its hosts are told."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from forerun.errors import STORAGE_FAILED, StorageError, UserError


@dataclass(frozen=True)
class Ending:
    """`what`, `why` and `fix` are there when it is the user who can mend it."""

    code: int
    text: str = ""
    what: str = ""
    why: str = ""
    fix: str = ""
    host: int = -1  # whose worker has said it already

    @classmethod
    def mistake(cls, error: UserError) -> Self:
        return cls(error.exit_code, "", error.what, error.why, error.fix)

    @classmethod
    def told(cls, message: dict[str, Any]) -> Self:
        text, what, why, fix = (str(message[key]) for key in ("text", "what", "why", "fix"))
        return cls(int(message["code"]), text, what, why, fix, int(message["host"]))

    def message(self) -> dict[str, Any]:
        return {"kind": "over", **asdict(self)}

    def exit_code(self) -> int:
        """Raises what the user can mend."""
        if self.what:
            kind = StorageError if self.code == STORAGE_FAILED else UserError
            raise kind(self.what, why=self.why, fix=self.fix)
        return self.code
