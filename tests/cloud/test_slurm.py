"""The batch script on a real Slurm cluster: a node is lost, the job is requeued and resumes."""

import json
import secrets
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_programs, until

from forerun.cloud.manifests.launch import Launch
from forerun.cloud.manifests.slurm import batch_script

pytestmark = pytest.mark.timing

SOURCE = Path(__file__).resolve().parents[2] / "src"
STEPS = 200
JOB = f"""\
name: tiny
model: {{layers: 1, embed: 16, heads: 2}}
data: text
sequence: 16
batch: 8
steps: {STEPS}
devices: 2
optimizer: {{lr: 1e-2}}
precision: {{compute: float32}}
remat: none
checkpoint: {{every: 10}}
sample: {{tokens: 0}}
"""


def test_a_lost_node_requeues_the_job_and_it_resumes(tmp_path: Path) -> None:
    assert not missing_programs(), "install the Debian packages slurmctld, slurmd and munge"
    shared, daemons = tmp_path / "shared", tmp_path / "slurm"
    shared.mkdir()
    daemons.mkdir()
    (shared / "text").mkdir()
    (shared / "text" / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    (shared / "job.yaml").write_text(JOB)
    (shared / "secret").write_text(secrets.token_hex(16))
    (shared / "secret").chmod(0o600)
    (shared / "job.sbatch").write_text(batch_script(Launch("tiny", JOB, "cpu", None, 2), str(shared), str(shared)))
    environment = {
        "FORERUN": f"{sys.executable} -P -m forerun",
        "PYTHONPATH": str(SOURCE),
        "FORERUN_METADATA_URL": "http://127.0.0.1:9",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    metrics = shared / "runs" / "tiny" / "metrics.jsonl"
    with SlurmCluster(daemons, 2) as cluster:
        number = cluster.submit(shared / "job.sbatch", environment)
        until(lambda: metrics.exists() and metrics.read_text().count("\n") > 25, "the job does not train", 300)
        cluster.lose_node(1)
        until(lambda: cluster.job(number).get("Restarts") == "1", "the job is not requeued", 300)
        trained = metrics.read_text().count("\n")
        assert trained < STEPS
        cluster.start_node(1)
        # The rest of the first start must be gone: Slurm starts the job again after two minutes, so it always is.
        until(lambda: cluster.idle_nodes() == 2 and cluster.job(number)["JobState"] == "PENDING", "nodes are busy", 300)
        cluster.command("scontrol", "update", f"JobId={number}", "StartTime=now")
        until(lambda: cluster.job(number).get("JobState") in ("COMPLETED", "FAILED"), "the job does not end", 300)
        assert cluster.job(number)["JobState"] == "COMPLETED", (shared / f"slurm-{number}.log").read_text()[-3000:]
    summary = json.loads((shared / "runs" / "tiny" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert 10 <= summary["resumed_at"] <= trained
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, STEPS + 1))
