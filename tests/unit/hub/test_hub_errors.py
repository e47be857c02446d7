"""Trouble of the disk while a model is fetched, which no server can cause."""

from __future__ import annotations

import errno

import pytest

from forerun.errors import UserError
from forerun.exit_codes import STORAGE_FAILED, USER_MISTAKE
from forerun.hub.errors import to_user_error


@pytest.mark.parametrize(
    ("error", "word", "exit_code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk became full", STORAGE_FAILED),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk became full", STORAGE_FAILED),
        (PermissionError(errno.EACCES, "Permission denied"), "cache cannot be written", USER_MISTAKE),
        (OSError(errno.EROFS, "Read-only file system"), "cache cannot be written", USER_MISTAKE),
        (OSError("Consistency check failed: file should be of size 9 but has size 4"), "was interrupted", USER_MISTAKE),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "was interrupted", USER_MISTAKE),
    ],
)
def test_what_the_user_can_mend(error: Exception, word: str, exit_code: int) -> None:
    told = to_user_error(error, "acme/tiny", None, downloading=True)
    assert isinstance(told, UserError)
    assert told.exit_code == exit_code
    assert word in told.what
    assert str(error.args[-1]) in told.why


def test_our_own_mistakes_stay_what_they_are() -> None:
    for error in (TypeError("wrong"), UserError("E-HUB-999", "a", why="b", fix="c")):
        assert to_user_error(error, "acme/tiny", None, downloading=True) is error
