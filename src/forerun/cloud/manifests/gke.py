"""A JobSet for Google Kubernetes Engine: one pod for each host of a TPU slice.

GKE sets `TPU_WORKER_ID` and `TPU_WORKER_HOSTNAMES` in pods that request TPUs. `--host auto` reads them. If a pod ends,
its Job fails, and the JobSet starts all pods again: the supervisors of a slice belong together. Exit codes after which
a restart cannot help end the JobSet.
"""

from __future__ import annotations

from typing import Any

from forerun.cloud.manifests.launch import FINAL_EXIT_CODES, STOP_SECONDS, Launch, require_slice, train_arguments
from forerun.cloud.manifests.yaml_text import documents
from forerun.supervise.host_address import PORT

# The label cloud.google.com/gke-tpu-accelerator of node pools.
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
MAX_RESTARTS = 100  # preemptions included
JOB_FOLDER = "/job"
SECRET_KEY = "secret"


def jobset(launch: Launch) -> str:
    """Return a ConfigMap with the job and a JobSet, as one YAML file. The secret of the run is created by the user."""
    slice_, accelerator = require_slice(launch, "GKE", ACCELERATORS.get)
    selector = {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, slice_.shape)),
    }
    if launch.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    chips = slice_.chips // slice_.hosts
    several = launch.hosts > 1
    train = train_arguments(launch, f"{JOB_FOLDER}/job.yaml", "--host auto" if several else "")
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "nodeSelector": selector,
        "containers": [
            {
                "name": "forerun",
                "image": launch.image,
                "command": ["/bin/sh", "-c"],
                "args": [f"exec forerun {train}"],
                "env": [
                    {
                        "name": "FORERUN_SECRET",
                        "valueFrom": {"secretKeyRef": {"name": secret_name(launch), "key": SECRET_KEY}},
                    }
                ],
                "ports": [{"containerPort": 8471}, {"containerPort": PORT}],
                "resources": {"limits": {"google.com/tpu": chips}, "requests": {"google.com/tpu": chips}},
                "volumeMounts": [{"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}],
                "workingDir": "/tmp",
            }
        ],
        "volumes": [{"name": "job", "configMap": {"name": f"{launch.label}-job"}}],
    }
    if not several:
        del pod["containers"][0]["env"]
    if launch.spot:
        pod["tolerations"] = [
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    job_spec: dict[str, Any] = {
        "parallelism": launch.hosts,
        "completions": launch.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "forerun",
                        "operator": "In",
                        "values": list(FINAL_EXIT_CODES),
                    },
                }
            ]
        },
        "template": {"spec": pod},
    }
    if launch.hours is not None:
        job_spec["activeDeadlineSeconds"] = round(launch.hours * 3600)
    labels = {"forerun-run": launch.label}
    if launch.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = launch.queue
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{launch.label}-job", "labels": {"forerun-run": launch.label}},
        "data": {"job.yaml": launch.job},
    }
    whole = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": launch.label,
            "labels": labels,
            # All pods of the Job are on one node pool, which is one slice, and no other Job uses it.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": MAX_RESTARTS,
                "rules": [
                    {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job_spec}}],
        },
    }
    if launch.hours is not None:
        whole["spec"]["failurePolicy"]["rules"].append(  # type: ignore[index]
            {"name": "deadline", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
        )
    return documents(config, whole)


def secret_name(launch: Launch) -> str:
    return f"{launch.label}-secret"


def dockerfile(wheel: str, lock: str, python: str) -> str:
    """Return a Dockerfile that installs the wheel and its hash-locked requirements."""
    return (
        f"FROM python:{python}-slim\n"
        f"COPY {lock} {wheel} /tmp/\n"
        f"RUN pip install --no-cache-dir --require-hashes -r /tmp/{lock} \\\n"
        f" && pip install --no-cache-dir --no-deps /tmp/{wheel}\n"
    )
