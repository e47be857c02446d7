"""What Orbax's threads say after a save has failed is kept from the user; what anybody else says is not."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.checkpoint.orbax_adapter import quiet_orbax


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Without the collector: what it finds of an earlier test would be told here, too."""
    found: list[Any] = []
    gc.disable()
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    quiet_orbax()
    quiet_orbax()
    yield found
    gc.enable()


def unraisable(error: BaseException, of: object = None) -> Any:
    return SimpleNamespace(exc_type=type(error), exc_value=error, exc_traceback=None, err_msg=None, object=of)


def test_a_write_that_ends_after_its_save_is_not_told(told: list[Any]) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError) as closed:
        loop.call_soon_threadsafe(print)
    sys.unraisablehook(unraisable(closed.value))
    assert told == []


def test_what_was_never_begun_is_not_told(told: list[Any]) -> None:
    async def cancellable() -> None: ...

    async def mine() -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cancellable.__qualname__ = "cancellable"
        del (left := [cancellable()])[0]
        assert told == []
        mine.__qualname__ = "mine"
        del (left := [mine()])[0]
    assert left == []
    assert [str(one.exc_value) for one in told] == ["coroutine 'mine' was never awaited"]


def test_everything_else_is(told: list[Any]) -> None:
    others = [unraisable(ValueError("no")), unraisable(RuntimeError("Event loop is closed"), of=print)]
    for one in others:
        sys.unraisablehook(one)
    assert told == others
