"""Trouble of the disk while a model is fetched, which no server can cause."""

from __future__ import annotations

import errno

import pytest

from forerun.errors import STORAGE_FAILED, USER_MISTAKE, UserError
from forerun.hub.refusal import refusal


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
    told = refusal(error, "acme/tiny", None, downloading=True)
    assert isinstance(told, UserError)
    assert told.exit_code == exit_code
    assert word in told.what
    assert str(error.args[-1]) in told.why


def test_our_own_mistakes_stay_what_they_are() -> None:
    for error in (TypeError("wrong"), UserError("a", why="b", fix="c")):
        assert refusal(error, "acme/tiny", None, downloading=True) is error
