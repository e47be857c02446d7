"""The wheel of the running forerun."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from forerun.cloud.setup.wheel import build_wheel

METADATA = {"METADATA": b"Name: forerun\n"}


def test_the_wheel_has_no_hidden_and_no_compiled_files(tmp_path: Path) -> None:
    package = tmp_path / "forerun"
    for name in ("a.py", "units/a.service", ".env", ".git/config", "__pycache__/a.txt", "a.pyc"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    with zipfile.ZipFile(io.BytesIO(build_wheel(package, METADATA).content)) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert names == ["forerun/a.py", "forerun/units/a.service"]
