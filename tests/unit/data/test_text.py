from __future__ import annotations

from pathlib import Path

import pytest
from error_assertions import raises_error

from forerun.data import text
from forerun.errors import UserError


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("x")
    with pytest.raises(UserError) as error:
        text.local_path(str(tmp_path / "shakespear.txt"), key="data.path")
    assert "shakespeare.txt" in error.value.fix


@pytest.mark.parametrize(("place", "command"), [("gs://bucket/text", "gcloud storage cp"), ("https://a.b/c", "curl")])
def test_an_address_is_not_a_local_path(place: str, command: str) -> None:
    with raises_error("E-DATA-076") as error:
        text.local_path(place, key="data.tokenizer")
    assert command in error.value.fix
