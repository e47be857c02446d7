"""The folder of a launch: its files, the mode of the secret, and what is refused."""

import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from forerun.cloud.manifests import Launch, launch_folder, require_shared_places
from forerun.errors import UserError
from forerun.hardware.slices import slice_named

JOB = "name: tiny\n"


def launch(name: str = "v6e-16", image: str | None = None) -> Launch:
    chosen = slice_named(name)
    return Launch("tiny", JOB, "tpu", chosen, chosen.hosts, image=image)


def test_slurm(tmp_path: Path) -> None:
    content = launch_folder(Launch("tiny", JOB, "gpu", None, 2, 8, hours=1.5), "slurm", tmp_path, tmp_path)
    content.write(tmp_path / "out")
    script = (tmp_path / "out" / "job.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert {line for line in script.splitlines() if line.startswith("#SBATCH")} >= {
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=90",
        "#SBATCH --requeue",
    }
    secret = tmp_path / "out" / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    before = secret.read_bytes()
    assert before.decode() not in script
    launch_folder(launch(), "slurm", tmp_path, tmp_path).write(tmp_path / "out")
    assert secret.read_bytes() == before  # a run in progress may use it


def test_skypilot(tmp_path: Path) -> None:
    content = launch_folder(launch("v5e-16"), "skypilot", tmp_path, tmp_path)
    task = yaml.safe_load(content.files["task.yaml"])
    assert task["resources"]["accelerators"] == "tpu-v5litepod-16:1"
    assert task["resources"]["accelerator_args"]["runtime_version"] == "v2-alpha-tpuv5-lite"
    assert {Path(source).name for source in task["file_mounts"].values()} <= set(content.files)
    assert task["secrets"] == {"FORERUN_SECRET": None}
    assert b"libtpu==" in content.files["requirements.lock"]


def test_gke_needs_an_image(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        launch_folder(launch(), "gke", tmp_path, tmp_path)
    assert caught.value.code == "E-CLOUD-082"
    files = launch_folder(launch(image="registry/forerun:1"), "gke", tmp_path, tmp_path).files
    assert {"jobset.yaml", "Dockerfile", "requirements.lock", "secret"} < set(files)


@pytest.mark.parametrize(
    ("scheduler", "checkpoints", "local", "code"),
    [
        ("gke", None, [], "E-CLOUD-081"),
        ("skypilot", "/disk", [], "E-CLOUD-081"),
        ("gke", "gs://b/c", ["text"], "E-CLOUD-083"),
    ],
)
def test_places_that_the_machines_do_not_have(scheduler, checkpoints, local, code) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        require_shared_places(scheduler, checkpoints, local)
    assert caught.value.code == code


def test_places_that_all_machines_have() -> None:
    require_shared_places("slurm", None, ["text"])
    require_shared_places("gke", "gs://b/c", [])
