"""A file that is exchanged for a link while it is opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import UserError
from forerun.hub.files import open_regular


def test_a_link_put_there_after_the_check_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    file = tmp_path / "model" / "config.json"
    file.parent.mkdir()
    file.write_bytes(b"{}")
    resolve = Path.resolve

    def exchanged(path: Path, *arguments: Any, **more: Any) -> Path:
        real = resolve(path, *arguments, **more)
        if path == file:
            file.unlink()
            file.symlink_to(secret)
        return real

    monkeypatch.setattr(Path, "resolve", exchanged)
    opened: list[int] = []
    with pytest.raises(UserError):
        opened.append(open_regular(file))
    assert [os.close(descriptor) for descriptor in opened] == []
    assert file.is_symlink()
