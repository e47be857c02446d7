"""Trouble of the disk while a model is fetched, which no server can cause."""

from __future__ import annotations

import errno

import pytest

from forerun.errors import UserError
from forerun.hub.refusal import refusal


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk became full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk became full"),
        (PermissionError(errno.EACCES, "Permission denied"), "cache cannot be written"),
        (OSError(errno.EROFS, "Read-only file system"), "cache cannot be written"),
        (OSError("Consistency check failed: file should be of size 9 but has size 4"), "was interrupted"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "was interrupted"),
    ],
)
def test_what_the_user_can_mend(error: Exception, word: str) -> None:
    told = refusal(error, "acme/tiny", None, downloading=True)
    assert isinstance(told, UserError)
    assert word in told.what
    assert str(error.args[-1]) in told.why


def test_our_own_mistakes_stay_what_they_are() -> None:
    for error in (TypeError("wrong"), UserError("a", why="b", fix="c")):
        assert refusal(error, "acme/tiny", None, downloading=True) is error
