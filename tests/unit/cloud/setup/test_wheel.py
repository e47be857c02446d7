"""The wheel of the running forerun."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.cloud.record.entries import CloudRun, Option
from forerun.cloud.setup import wheel as module
from forerun.cloud.setup.startup import startup_script
from forerun.cloud.setup.wheel import Wheel, build_wheel, keep_wheel, planned_wheel
from forerun.errors import UserError

METADATA = {"METADATA": b"Name: forerun\n"}


def test_the_wheel_has_no_hidden_and_no_compiled_files(tmp_path: Path) -> None:
    package = tmp_path / "forerun"
    for name in ("a.py", "units/a.service", ".env", ".git/config", "__pycache__/a.txt", "a.pyc"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    with zipfile.ZipFile(io.BytesIO(build_wheel(package, METADATA).content)) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert names == ["forerun/a.py", "forerun/units/a.service"]


OPTION = Option("tpu", "v6e-8", "us-east5-b", "spot", 1, 10.8)
RUN = CloudRun("tiny", "gs://bucket/runs/tiny", "steps: 1\n", (OPTION,), 40.0, 0.0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_later_attempts_get_the_wheel_that_planned(monkeypatch):
    digest = keep_wheel()
    assert digest == build_wheel().sha256
    run = replace(RUN, versions={"wheel": digest})
    # The user edits the source of forerun while the run waits for capacity.
    monkeypatch.setattr(module, "build_wheel", lambda: Wheel("forerun-9-py3-none-any.whl", b"edited"))
    assert planned_wheel(run).sha256 == digest
    assert f"WHEEL_SHA256={digest}\n" in startup_script(run, OPTION)
    assert planned_wheel(RUN).content == b"edited"


def test_another_machine_without_that_wheel_is_refused(tmp_path):
    with pytest.raises(UserError) as error:
        planned_wheel(replace(RUN, versions={"wheel": "0" * 64}))
    assert error.value.code == "E-CLOUD-049"
    damaged = tmp_path / "forerun/wheels" / ("0" * 64) / "forerun-0-py3-none-any.whl"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"damaged")
    with pytest.raises(UserError):
        planned_wheel(replace(RUN, versions={"wheel": "0" * 64}))


def test_old_wheels_are_removed(tmp_path, monkeypatch):
    for number in range(12):
        wheel = Wheel("forerun-0-py3-none-any.whl", str(number).encode())
        monkeypatch.setattr(module, "build_wheel", lambda wheel=wheel: wheel)
        last = keep_wheel()
    kept = list((tmp_path / "forerun/wheels").iterdir())
    assert len(kept) == 10
    assert last in {one.name for one in kept}
