"""Names and labels of resources satisfy the rules that the clouds publish."""

import re

import pytest

from forerun.cloud.labels import request_id, resource_name, run_label, slice_labels
from forerun.errors import UserError

RESOURCE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"[a-z0-9_-]{0,63}")


@pytest.mark.parametrize("name", ["quickstart", "Llama 3.2_LoRA", "7b", "a" * 40])
def test_names_are_valid(name: str) -> None:
    assert RESOURCE_NAME.fullmatch(resource_name(name, 999))
    assert all(LABEL.fullmatch(text) for pair in slice_labels(name, 999).items() for text in pair)


@pytest.mark.parametrize("name", ["___", "a" * 41])
def test_names_that_cannot_be_used(name: str) -> None:
    with pytest.raises(UserError) as caught:
        run_label(name)
    assert caught.value.code == "E-CLOUD-001"


def test_a_request_keeps_its_id() -> None:
    assert request_id("gs://b/run", 1, "create") == request_id("gs://b/run", 1, "create")
    assert len({request_id("gs://b/run", n, kind) for n in (1, 2) for kind in ("create", "delete")}) == 4
