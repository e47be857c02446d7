"""The JobSet against the schema that the project publishes, and the values that GKE needs."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from forerun.cloud.manifests import Launch, jobset
from forerun.errors import UserError
from forerun.hardware.slices import slice_named

CRD = json.loads((Path(__file__).parent / "jobset_crd.json").read_text())
JOB = "name: big\nsteps: 3\n"


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
        jobset(Launch("Big run", JOB, "tpu", chosen, chosen.hosts, image="i", **options))
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
    assert config["data"] == {"job.yaml": JOB}
    # The secret is not in the file: the user creates it, and the pods refer to it.
    (variable,) = pod_of(whole)["containers"][0]["env"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "big-run-secret", "key": "secret"}}


@pytest.mark.parametrize("name", ["v2-8", "v3-32"])
def test_generations_that_gke_does_not_offer(name: str) -> None:
    with pytest.raises(UserError) as caught:
        launched(name)
    assert caught.value.code == "E-CLOUD-080"
