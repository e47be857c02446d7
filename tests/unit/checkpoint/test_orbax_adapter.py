"""The specs that Orbax gets for the arrays of a checkpoint in a bucket."""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.checkpoint import orbax_adapter
from forerun.checkpoint.orbax_adapter import quiet_orbax
from forerun.errors import UserError
from forerun.storage.retries import ARRAY_RETRIES

MODULE = "orbax.checkpoint._src.serialization.tensorstore_utils"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of Orbax. What `use_buckets` changes is undone."""
    found: Any = importlib.import_module(MODULE)
    monkeypatch.setattr(found, "build_kvstore_tspec", found.build_kvstore_tspec)
    orbax_adapter.use_buckets.cache_clear()
    yield found
    orbax_adapter.use_buckets.cache_clear()


def test_arrays_in_s3_have_the_endpoint_and_the_credentials(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    orbax_adapter.use_buckets()
    spec = module.build_kvstore_tspec("s3://bucket/runs/7-1-1/state", use_ocdbt=True)
    assert spec["driver"] == "ocdbt"
    base = spec["base"]
    assert (base["driver"], base["bucket"], base["path"]) == ("s3", "bucket", "runs/7-1-1/state")
    assert (base["endpoint"], base["aws_credentials"]) == ("http://127.0.0.1:9", {"type": "environment"})
    assert base["context"] == {"s3_request_retries": ARRAY_RETRIES}


def test_other_addresses_keep_the_spec_of_orbax(module: Any) -> None:
    before = module.build_kvstore_tspec("/data/runs/7-1-1/state", use_ocdbt=True)
    google = module.build_kvstore_tspec("gs://bucket/runs/7-1-1/state", use_ocdbt=True)
    orbax_adapter.use_buckets()
    assert module.build_kvstore_tspec("/data/runs/7-1-1/state", use_ocdbt=True) == before
    own = module.build_kvstore_tspec("gs://bucket/runs/7-1-1/state", use_ocdbt=True)
    assert own["base"].pop("context") == {"gcs_request_retries": ARRAY_RETRIES}
    assert own == google


def test_orbax_without_the_function_is_an_error(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "build_kvstore_tspec")
    with pytest.raises(UserError) as caught:
        orbax_adapter.use_buckets()
    assert caught.value.code == "E-CHECKPOINT-018"


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
