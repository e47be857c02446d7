"""Lose a node of a real Slurm cluster during a job of `forerun manifest`: Slurm requeues it, and it resumes.

    python bench/slurm_requeue.py        # four minutes; needs root and the Debian packages slurmctld, slurmd, munge

Slurm waits two minutes before it starts a requeued job, so this is a command and not a test. It fails with an assertion
if the job does not resume. Writes bench/results/slurm_requeue.json.
"""

import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slurm_cluster import SlurmCluster, missing_programs, until

from forerun.cloud.manifests import Launch, batch_script

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT.parent / "src"
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


def lose_a_node(folder: Path) -> dict[str, object]:
    """Return what happened."""
    shared, daemons = folder / "shared", folder / "slurm"
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
        lost = time.monotonic()
        cluster.start_node(1)
        until(lambda: cluster.job(number).get("JobState") in ("COMPLETED", "FAILED"), "the job does not end", 600)
        fields, seconds = cluster.job(number), time.monotonic() - lost
        assert fields["JobState"] == "COMPLETED", (shared / f"slurm-{number}.log").read_text()[-3000:]
    summary = json.loads((shared / "runs" / "tiny" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert 10 <= summary["resumed_at"] <= trained
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, STEPS + 1))
    return {
        "slurm": subprocess.run(
            ["slurmctld", "-V"], env=cluster.environment, capture_output=True, text=True, check=True
        ).stdout.strip(),
        "nodes": 2,
        "steps": STEPS,
        "steps_before_the_loss": trained,
        "resumed_at": summary["resumed_at"],
        "restarts": int(fields["Restarts"]),
        "seconds_from_requeue_to_end": round(seconds),
    }


def main() -> None:
    if missing := missing_programs():
        sys.exit(f"missing: {', '.join(missing)}; install the Debian packages slurmctld, slurmd and munge")
    with tempfile.TemporaryDirectory(prefix="forerun-slurm-") as name:
        found = lose_a_node(Path(name))
    text = json.dumps(found, indent=1)
    print(text)
    (ROOT / "results" / "slurm_requeue.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
