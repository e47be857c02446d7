"""Assertions about errors: codes and values, never complete sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forerun.errors import UserError


def assert_error(error: UserError, code: str, *, what: str = "", why: str = "", fix: str = "") -> None:
    """Assert the code of `error`, and that its parts contain these values (names, numbers, places, commands)."""
    assert error.code == code, str(error)
    for part, value in (("what", what), ("why", why), ("fix", fix)):
        assert value in getattr(error, part), f"{part} lacks {value!r}\n{error}"


@contextmanager
def raises_error(code: str, *what: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a UserError with this code, whose `what` contains these values (names, numbers, places, commands)."""
    with pytest.raises(UserError) as caught:
        yield caught
    assert caught.value.code == code, str(caught.value)
    for value in what:
        assert value in caught.value.what, str(caught.value)
