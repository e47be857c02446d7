"""The specs that Orbax gets for the arrays of a checkpoint in a bucket."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from forerun.checkpoint import orbax_adapter
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
