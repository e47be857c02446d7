"""Assertions about errors: codes and values, never complete sentences."""

from __future__ import annotations

from forerun.errors import UserError


def assert_error(error: UserError, code: str, *, what: str = "", why: str = "", fix: str = "") -> None:
    """Assert the code of `error`, and that its parts contain these values (names, numbers, places, commands)."""
    assert error.code == code, str(error)
    for part, value in (("what", what), ("why", why), ("fix", fix)):
        assert value in getattr(error, part), f"{part} lacks {value!r}\n{error}"
