"""Time from `forerun run` to the first step of training, with a slice that is available immediately.

    python bench/cloud_start.py                # writes results/cloud_start.json and .md; exit code 1 above the limit
    python bench/cloud_start.py --slice v6e-16

The cloud is the fake of tests/cloud. Its hosts are namespaces of this machine, where the startup script, the agent and
the training on CPU really run. The creation of a real slice takes minutes, and is not part of the time. The download of
the packages is measured alone, in advance, and is not part of the limit. The machine must be idle, because the hosts,
the fake cloud and the bucket share its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "cloud"), str(ROOT / "src")]

from hosts import site as test_site  # noqa: E402
from hosts.site import Command, Site, cloud_site  # noqa: E402

RESULTS = ROOT / "bench" / "results"
LIMIT_SECONDS = 60.0
NAME = "start"
JOB = f"""\
name: {NAME}
model: {{layers: 2, embed: 64, heads: 2}}
data: text
sequence: 64
batch: 8
steps: 20
device: cpu
precision: {{compute: float32}}
checkpoint: {{every: 10, folder: "gs://checkpoints/runs"}}
sample: {{tokens: 0}}
"""
# The last line that a host has written before each part ends.
PARTS = ("waiting", "installing", "checking", "starting", "started")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", default="v6e-8", help="slice to rent (default: v6e-8, one host)")
    parser.add_argument("--zone", default="us-central1-b")
    args = parser.parse_args()
    download_seconds = download()
    test_site.warm_packages()
    folder = Path(tempfile.mkdtemp(prefix="forerun-bench-"))
    try:
        with cloud_site(folder, speed=1.0, host_variables={"PYTHONPATH": "", "FORERUN_SMOKE_SECONDS": ""}) as site:
            found = measure(site, args.slice, args.zone)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found["download_seconds"] = round(download_seconds, 1)
    RESULTS.joinpath("cloud_start.json").write_text(json.dumps(found, indent=1) + "\n")
    RESULTS.joinpath("cloud_start.md").write_text(page(found))
    print(page(found))
    return 0 if found["first_step_seconds"] <= LIMIT_SECONDS else 1


def download() -> float:
    """Return the time of one installation of all packages into an empty cache."""
    test_site.warm_packages()
    with tempfile.TemporaryDirectory(prefix="forerun-bench-", dir=test_site.PACKAGES) as name:
        uv, venv = str(test_site.PACKAGES / "bin" / "uv"), Path(name) / "venv"
        environment = os.environ | {"UV_CACHE_DIR": f"{name}/cache"}
        began = time.monotonic()
        subprocess.run([uv, "venv", "--quiet", str(venv)], env=environment, check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), "--require-hashes"]
        lock = str(test_site.PACKAGES / "requirements.txt")
        subprocess.run([*install, "--requirement", lock], env=environment, check=True)
        return time.monotonic() - began


def measure(site: Site, slice_name: str, zone: str) -> dict[str, Any]:
    (site.laptop / "text").mkdir()
    (site.laptop / "text" / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 400)
    (site.laptop / "job.yaml").write_text(JOB)
    options = ["--on", slice_name, "--zones", zone, "--max-usd", "40", "--yes"]
    began, began_at = time.monotonic(), time.time()
    with site.started("run", "job.yaml", *options) as run:
        run.until(lambda: ready(site), site, "a slice")
        ready_seconds = time.monotonic() - began
        run.until(lambda: first_step(site), site, "the first step")
        first_step_seconds = time.monotonic() - began
        run.wait(site)
        total_seconds = time.monotonic() - began
    return {
        "slice": slice_name,
        "hosts": len(site.host_folders()),
        "cores": os.cpu_count(),
        "limit_seconds": LIMIT_SECONDS,
        "ready_seconds": round(ready_seconds, 1),
        "first_step_seconds": round(first_step_seconds, 1),
        "total_seconds": round(total_seconds, 1),
        "host_0_seconds": host_times(site, began_at),
        "output": lines_of(run),
    }


def ready(site: Site) -> bool:
    return any(one["ready_at"] for one in site.cloud.rentals())


def first_step(site: Site) -> bool:
    """Return whether host 0 has written the metrics of a step."""
    return any((site.folder / "hosts").glob(f"*/changes/var/lib/forerun/job/runs/{NAME}/metrics.jsonl"))


def host_times(site: Site, began_at: float) -> dict[str, float]:
    """Return when host 0 began each part of its setup, in seconds after `forerun run`."""
    found = {}
    log = site.host_folders()[0] / "var/log/forerun/startup.log"
    for line in log.read_text(errors="replace").splitlines():
        words = line.split(" ")
        if len(words) > 1 and words[1] in PARTS and words[0].endswith("Z"):
            at = time.mktime(time.strptime(words[0], "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
            found[words[1]] = round(at - began_at, 1)
    return found


def lines_of(run: Command) -> list[str]:
    return [line for line in run.output.splitlines() if not line.startswith("I")]


def page(found: dict[str, object]) -> str:
    parts = found["host_0_seconds"]
    assert isinstance(parts, dict)
    rows = [("the slice is ready", found["ready_seconds"])]
    texts = {
        "installing": "the job is delivered by ssh; packages are installed from the cache",
        "checking": "`forerun doctor --smoke` begins",
        "starting": "it has passed; training starts",
    }
    rows += [(text, parts[name]) for name, text in texts.items() if name in parts]
    rows += [("the first step is done", found["first_step_seconds"]), ("export and deletion", found["total_seconds"])]
    table = "\n".join(f"| {what} | {seconds:.0f} |" for what, seconds in rows)  # type: ignore[str-format]
    return (
        f"# Time from `forerun run` to the first step\n\n"
        f"{found['slice']} with {found['hosts']} host, as namespaces of a machine with {found['cores']} cores; the "
        f"fake cloud has capacity immediately. Limit: {LIMIT_SECONDS:.0f} s without the download of the packages, "
        f"which takes {found['download_seconds']} s.\n\n| what | seconds after `forerun run` |\n|---|---|\n{table}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
