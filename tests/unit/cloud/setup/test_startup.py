import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import forerun
from forerun.cloud.record.entries import AttemptEntry, CloudRun, Option
from forerun.cloud.setup.requirements import PYTHONS, locked_requirements, uv_requirement
from forerun.cloud.setup.startup import slice_metadata, startup_script, unit_files
from forerun.cloud.setup.wheel import build_wheel
from forerun.errors import UserError

UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "uv"
ROOT = Path(forerun.__file__).parents[2]
OPTION = Option("tpu", "v6e-16", "us-east5-b", "spot", 4, 10.8)
RUN = CloudRun("tiny", "gs://bucket/runs/tiny", "steps: 1\n", (OPTION,), 40.0, 0.0)
ATTEMPT = AttemptEntry(1, OPTION, "forerun-tiny-1", 0.0, 3600, 0.0)


def test_a_machine_that_installed_the_wheel_builds_the_same_wheel(tmp_path):
    """A keeper sends the forerun that it runs: its digest must be the one in the startup script."""
    wheel = build_wheel()
    file = tmp_path / wheel.name
    file.write_bytes(wheel.content)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
    assert "forerun/cloud/setup/startup.sh" in names
    assert not any("__pycache__" in name for name in names)
    target = tmp_path / "installed"
    command = [UV, "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(file)]
    subprocess.run(command, check=True, capture_output=True)
    code = "from forerun.cloud.setup.wheel import build_wheel; print(build_wheel().sha256)"
    environment = {**os.environ, "PYTHONPATH": str(target)}
    shown = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == wheel.sha256 == hashlib.sha256(wheel.content).hexdigest()


def test_a_wheel_needs_an_installation(monkeypatch):
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError) as error:
        build_wheel()
    assert error.value.code == "E-CLOUD-030"


@pytest.mark.parametrize("python", PYTHONS)
def test_a_lock_has_the_packages_of_its_device_only(python):
    names = {device: set(locked_requirements(device, python).versions()) for device in ("tpu", "gpu", "cpu")}
    assert names["tpu"] - names["cpu"] == {"libtpu"}
    assert {"jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13"} <= names["gpu"] - names["cpu"]
    assert names["cpu"] == names["tpu"] & names["gpu"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[<>=\[]", line)[0] for line in project["dependencies"]}
    assert required <= names["cpu"]
    for line in locked_requirements("gpu", python).content.decode().splitlines():
        assert re.fullmatch(r"[a-z0-9._-]+==\S+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line


def test_machines_get_the_versions_of_development():
    """jax and libtpu that compile the plan are those that run it."""
    for python in ("3.11", "3.13"):
        text = (ROOT / f"requirements/py{python.replace('.', '')}.lock").read_text()
        developed = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE))
        rented = locked_requirements("tpu", python).versions()
        assert {
            name: version for name, version in rented.items() if name in developed and developed[name] != version
        } == {}
        assert rented["libtpu"] == developed["libtpu"]


def test_another_python_is_refused():
    with pytest.raises(UserError) as error:
        locked_requirements("tpu", "3.10")
    assert error.value.code == "E-CLOUD-031"


def test_the_script_has_the_digests_of_what_is_delivered():
    script = startup_script(RUN, OPTION)
    values = dict(re.findall(r"^([A-Z0-9_]+)=(\S*)$", script, re.MULTILINE))
    assert values["WHEEL_SHA256"] == build_wheel().sha256
    assert values["LOCK_SHA256"] == locked_requirements("tpu").sha256
    assert (values["DEVICE"], values["HOSTS"]) == ("tpu", "4")
    assert f"UV_REQUIREMENT='{uv_requirement()}'" in script
    assert not re.search(r"@[A-Z0-9_]+@", script)
    assert len(script) < 200_000  # a value of the metadata has at most 256 KiB


def test_the_script_is_valid_for_any_name():
    hostile = replace(RUN, name="x'; touch /tmp/never; '", versions={"python": "3.12.4"})
    script = startup_script(hostile, OPTION)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    first = script.split("STATE_FOLDER=")[0] + '\nprintf %s "$RUN/$PYTHON"'
    shown = subprocess.run(["bash"], input=first, text=True, capture_output=True, check=True)
    assert shown.stdout == "x'; touch /tmp/never; '/3.12"


def test_the_metadata_has_the_key_and_no_secret():
    values = slice_metadata(RUN, ATTEMPT, "ssh-ed25519 AAAAC3 someone@laptop")
    assert values["ssh-keys"] == "forerun:ssh-ed25519 AAAAC3 forerun"
    assert values["forerun-folder"] == "gs://bucket/runs/tiny"
    assert values["forerun-max-usd"] == "40.00"
    assert values["enable-oslogin"] == "FALSE"
    assert values["startup-script"].startswith("#!/bin/bash\n")
    assert RUN.job not in json.dumps(values)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_units(tmp_path):
    for name, text in unit_files(replace(RUN, arguments=('a=100% $x "q"',)), 4).items():
        text = re.sub(r"/opt/forerun/venv/bin/\w+", "/bin/true", text)
        (tmp_path / name).write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)]
        found = subprocess.run(command, capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (0, "")
