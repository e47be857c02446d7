"""Test one cloud run from the queue to the deleted slice, with real hosts: sshd, startup script, agents, training.

The oracle of the trained weights is the same job, trained without interruption by four processes of this machine. The
oracle of the cost is the bill of the fake cloud, which knows nothing of forerun's record.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts.site import Command, Site, cloud_site

NAME = "tale"
FIRST_ZONE, SECOND_ZONE = "us-central1-b", "europe-west4-a"  # with different prices
SLICE, HOSTS = "v6e-16", 4
STEPS, HELD_STEP, SAVED_STEP = 24, 13, 12
JOB = f"""\
name: {NAME}
model: {{layers: 1, embed: 16, heads: 2}}
data: text
sequence: 16
batch: 8
steps: {STEPS}
device: cpu
optimizer: {{lr: 1e-2}}
precision: {{compute: float32}}
remat: none
checkpoint: {{every: 6, folder: "gs://checkpoints/runs"}}
sample: {{tokens: 0}}
"""
TEXT = "It was the best of times, it was the worst of times. " * 200


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with cloud_site(tmp_path_factory.mktemp("site"), speed=1.0) as made:
        (made.laptop / "text").mkdir()
        (made.laptop / "text" / "tale.txt").write_text(TEXT)
        (made.laptop / "job.yaml").write_text(JOB)
        yield made


def queued(site: Site, zone: str) -> list[str]:
    """Return the names of requests that wait for capacity in a zone, by the fake's own state."""
    return [
        one["name"]
        for one in site.cloud.resources()
        if one["kind"] == "queued resource"
        and one["zone"] == zone
        and one["resource"]["state"]["state"] == "WAITING_FOR_RESOURCES"
    ]


def running(site: Site, name: str) -> bool:
    return any(one["name"] == name and one["ready_at"] and not one["ended_at"] for one in site.cloud.rentals())


def saved_steps(site: Site) -> set[str]:
    return {name for name in site.object_names() if f"/{SAVED_STEP:08}" in name or f"-{SAVED_STEP}" in name}


def uninterrupted(folder: Path, site: Site) -> Path:
    """Train the job with four processes on this machine, without a cloud. Return the folder of its export."""
    folder.mkdir()
    (folder / "text").symlink_to(site.laptop / "text")
    (folder / "job.yaml").write_text(JOB)
    (folder / "secret").write_text(secrets.token_hex(16))
    (folder / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in site.environment.items() if "EMULATOR" not in name}
    train = site.command("train", "job.yaml", f"checkpoint.folder={folder / 'saved'}")
    train += ["--leader", f"127.0.0.1:{port}", "--secret", "secret"]
    processes = []
    for host in range(HOSTS):
        with (folder / f"{host}.log").open("wb") as log:
            command = [*train, "--host", f"{host}/{HOSTS}", f"runs={folder / f'runs-{host}'}"]
            processes.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert codes == [0] * HOSTS, "".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
    done = subprocess.run(
        site.command("export", str(folder / "runs-0" / NAME), "--to", str(folder / "export")),
        cwd=folder,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "export"


def weights(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.slow
@pytest.mark.timing
def test_a_run_from_the_queue_to_the_deleted_slice(site: Site, tmp_path: Path) -> None:
    cloud = site.cloud
    cloud.set_capacity(FIRST_ZONE, SLICE, 0)
    site.hold_at(HELD_STEP)
    options = ["--on", SLICE, "--spot", "--zones", f"{FIRST_ZONE},{SECOND_ZONE}", "--max-usd", "40", "--yes"]
    with site.started("run", "job.yaml", *options) as run:
        first, second, third = (f"forerun-{NAME}-{number}" for number in (1, 2, 3))
        run.until(lambda: queued(site, FIRST_ZONE) == [first], site, "a request in the queue")
        assert cloud.bill() == {}, "waiting costs nothing"
        cloud.set_capacity(FIRST_ZONE, SLICE, 1)
        run.until(lambda: running(site, first), site, "the first slice")
        run.until(lambda: saved_steps(site), site, "a checkpoint in the bucket")
        preempt(site, run, first)
        # The same zone is tried first. It has no capacity, and after the longest wait the next zone follows.
        run.until(lambda: queued(site, FIRST_ZONE) == [second], site, "a second request in the first zone")
        site.release()
        cloud.advance(601)
        run.until(lambda: running(site, third), site, "a slice in the second zone")
        assert run.wait(site) == 0, run.output + site.logs()
    assert_finished(site, run, (first, second, third))
    fetched = site.forerun("fetch", NAME)
    assert fetched.returncode == 0, fetched.stderr
    results = site.laptop / "runs" / NAME
    expected = weights(uninterrupted(tmp_path / "oracle", site))
    assert expected, "the oracle has weights"
    assert weights(results / "export") == expected


def preempt(site: Site, run: Command, name: str) -> None:
    site.cloud.set_capacity(FIRST_ZONE, SLICE, 0)
    site.cloud.preempt(name)
    assert not any("finished.json" in name for name in site.object_names())


def assert_finished(site: Site, run: Command, names: tuple[str, str, str]) -> None:
    """Check the bill, forerun's figures, and that nothing is left."""
    cloud = site.cloud
    assert cloud.resources() == []
    rentals = {one["name"]: one for one in cloud.rentals() if one["ready_at"] is not None}
    assert {name: rental["zone"] for name, rental in rentals.items()} == {names[0]: FIRST_ZONE, names[2]: SECOND_ZONE}
    assert all(rental["ended_at"] is not None for rental in rentals.values())
    summary = json.loads(site.read(f"runs/{NAME}/cloud/summary.json"))
    bill = cloud.bill()
    assert sum(bill.values()) > 0.01
    assert round(summary["actual"]["usd"], 2) == round(sum(bill.values()), 2)
    usd = {number: one["usd"] for number, one in enumerate(summary["attempts"])}
    assert usd == {number: pytest.approx(bill.get(name, 0.0), abs=0.005) for number, name in enumerate(names)}
    assert [one["end"] for one in summary["attempts"]] == ["preempted", "refused", "finished"]
    assert summary["actual"]["preemptions"] == 1
    assert f"${sum(bill.values()):.2f}" in run.output
    listed = site.forerun("ps", "--json")
    assert listed.returncode == 0, listed.stderr
    assert NAME not in listed.stdout
