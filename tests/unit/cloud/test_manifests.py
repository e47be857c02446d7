"""The folder of a launch: its files, the mode of the secret, and what is refused."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from forerun.cloud.manifests import Launch, jobset, launch_folder, require_shared_places
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


CRD = json.loads((Path(__file__).parent / "jobset_crd.json").read_text())
BIG_JOB = "name: big\nsteps: 3\n"


def strict(schema: Any) -> Any:
    """Refuse unknown keys: Kubernetes would drop them silently."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: strict(value) for name, value in schema.items()}
    if "properties" in inner and not inner.get("x-kubernetes-preserve-unknown-fields"):
        inner["additionalProperties"] = False
    return inner


def launched(name: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    chosen = slice_named(name)
    config, whole = yaml.safe_load_all(
        jobset(Launch("Big run", BIG_JOB, "tpu", chosen, chosen.hosts, image="i", **options))
    )
    return config, whole


def pod_of(whole: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = whole["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("name", ["v4-8", "v5e-1", "v5e-16", "v5p-8", "v6e-8", "v6e-256", "tpu7x-2x2x1"])
@pytest.mark.parametrize("options", [{}, {"spot": True, "queue": "team", "hours": 12.5}])
def test_the_published_schema_accepts_it(name: str, options: dict[str, Any]) -> None:
    _, whole = launched(name, **options)
    jsonschema.Draft202012Validator(strict(CRD["schema"])).validate(whole)
    assert whole["apiVersion"] == f"{CRD['group']}/{CRD['version']}"
    assert whole["kind"] == CRD["kind"]


def test_the_schema_would_refuse_a_wrong_key() -> None:
    _, whole = launched("v6e-8")
    whole["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(strict(CRD["schema"])).validate(whole)


@pytest.mark.parametrize(
    ("name", "accelerator", "topology", "hosts", "chips"),
    [
        ("v6e-256", "tpu-v6e-slice", "16x16", 64, 4),
        ("v6e-8", "tpu-v6e-slice", "2x4", 1, 8),
        ("v5e-16", "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v5p-16", "tpu-v5p-slice", "2x2x2", 2, 4),
    ],
)
def test_node_selectors_and_chips(name: str, accelerator: str, topology: str, hosts: int, chips: int) -> None:
    _, whole = launched(name)
    spec = whole["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = pod_of(whole)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert (spec["parallelism"], spec["completions"]) == (hosts, hosts)
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}


def test_the_same_supervised_command() -> None:
    (several,), (one,) = (pod_of(launched(name)[1])["containers"][0]["args"] for name in ("v6e-16", "v6e-8"))
    assert several == "exec forerun train /job/job.yaml device=tpu --supervise --host auto"
    assert one == "exec forerun train /job/job.yaml device=tpu --supervise"


def test_spot_queue_and_errors_that_end_it() -> None:
    config, whole = launched("v6e-16", spot=True, queue="team", hours=2)
    job = whole["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert pod_of(whole)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert whole["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["activeDeadlineSeconds"] == 7200
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 70]
    assert [rule["onJobFailureReasons"] for rule in whole["spec"]["failurePolicy"]["rules"]] == [
        ["PodFailurePolicy"],
        ["DeadlineExceeded"],
    ]
    assert config["data"] == {"job.yaml": BIG_JOB}
    # The secret is not in the file: the user creates it, and the pods refer to it.
    (variable,) = pod_of(whole)["containers"][0]["env"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "big-run-secret", "key": "secret"}}


@pytest.mark.parametrize("name", ["v2-8", "v3-32"])
def test_generations_that_gke_does_not_offer(name: str) -> None:
    with pytest.raises(UserError) as caught:
        launched(name)
    assert caught.value.code == "E-CLOUD-080"
