"""SkyPilot's own validator accepts the task. SkyPilot has its own environment: its requirements are many."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.cloud.manifests import Launch, launch_folder
from forerun.hardware.slices import slice_named

VERSION = "0.14.1"
ENVIRONMENT = Path(__file__).resolve().parents[2] / ".cache" / f"skypilot-{VERSION}"
VALIDATE = """\
import json, os, sys, sky
found = {}
for file in sys.argv[1:]:
    os.chdir(os.path.dirname(file))  # paths of files are relative to the folder of `sky jobs launch`
    task = sky.Task.from_yaml(file)
    task.validate()
    (resources,) = task.resources
    found[file] = [resources.accelerators, resources.accelerator_args, resources.use_spot, resources.job_recovery]
print("FOUND " + json.dumps(found))
"""
RUNTIMES = {
    "v4-8": "tpu-ubuntu2204-base",
    "v5e-8": "v2-alpha-tpuv5-lite",
    "v5p-16": "v2-alpha-tpuv5",
    "v6e-256": "v2-alpha-tpuv6e",
}


@pytest.fixture(scope="module")
def python() -> str:
    """Return a Python that has SkyPilot."""
    mark = ENVIRONMENT / "complete"
    if not mark.exists():
        subprocess.run(["uv", "venv", "-q", "--clear", "--python", sys.executable, str(ENVIRONMENT)], check=True)
        words = ["uv", "pip", "install", "-q", "--python", str(ENVIRONMENT), f"skypilot=={VERSION}"]
        subprocess.run(words, check=True)
        mark.touch()
    return str(ENVIRONMENT / "bin" / "python")


def test_its_validator_accepts_the_task(python: str, tmp_path: Path) -> None:
    tasks = {}
    for name in RUNTIMES:
        chosen = slice_named(name)
        launch = Launch("tiny", "name: tiny\n", "tpu", chosen, chosen.hosts, spot=True)
        launch_folder(launch, "skypilot", tmp_path / name, tmp_path).write(tmp_path / name)
        tasks[name] = str(tmp_path / name / "task.yaml")
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment.pop("PYTHONPATH", None)
    words = [python, "-c", VALIDATE, *tasks.values()]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    for name, runtime in RUNTIMES.items():
        accelerators, arguments, spot, recovery = found[tasks[name]]
        assert accelerators == {f"tpu-{name.replace('v5e', 'v5litepod')}": 1}
        assert arguments["runtime_version"] == runtime
        assert spot
        assert recovery["recover_on_exit_codes"] == [75]
