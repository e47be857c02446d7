"""Test one cloud run from the queue to the deleted slice, with real hosts: sshd, startup script, agents, training.

The run is executed once; each test looks at one property of it. The oracle of the trained weights is the same job,
trained without interruption by four processes of this machine. The oracle of the cost is the bill of the fake cloud,
which knows nothing of forerun's record.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hosts.metadata import TOKEN
from hosts.site import QUICKLY, Site, cloud_site

# The limit is for a machine that is ten times as busy as in CI.
pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.timeout(1800)]

NAME = "tale"
NAMES = FIRST, SECOND, THIRD = tuple(f"forerun-{NAME}-{number}" for number in (1, 2, 3))
FIRST_ZONE, SECOND_ZONE = "northamerica-northeast1-b", "us-central1-a"  # with different prices
SLICE, HOSTS = "v5e-16", 4
CENT = 0.01
STEPS, SAVED_STEP, HELD_STEP = 24, 12, 13
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
# The user's secrets. Each is unique, so a search finds every place that has it.
SECRETS = {"HF_TOKEN": f"hf_{secrets.token_hex(16)}", "WANDB_API_KEY": secrets.token_hex(20)}


@dataclass
class Story:
    """What was seen of the run.

    Attributes:
      commands: command lines of all processes of this machine and the hosts while the hosts were set up and trained.
      secret: of the supervisors of the first slice.
      private: mode and owner of the files of the first hosts that must be private, by host and path.
      listed: what `forerun ps --json` told another laptop during the training.
      before_queue: the bill while the first request waited.
    """

    site: Site
    output: str = ""
    exit_code: int | None = None
    commands: set[str] = field(default_factory=set)
    secret: str = ""
    private: dict[str, tuple[str, int]] = field(default_factory=dict)
    listed: subprocess.CompletedProcess[str] | None = None
    before_queue: dict[str, float] = field(default_factory=dict)
    waited: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(real_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with cloud_site(tmp_path_factory.mktemp("site"), speed=1.0) as site:
        (site.laptop / "text").mkdir()
        (site.laptop / "text" / "tale.txt").write_text(TEXT)
        (site.laptop / "job.yaml").write_text(JOB)
        yield tell(site)


def tell(site: Site) -> Story:
    """Run the job through the queue, a preemption and two zones, to its end."""
    cloud, told = site.cloud, Story(site)
    cloud.set_capacity(FIRST_ZONE, SLICE, 0)
    site.hold_at(HELD_STEP)
    options = ["--on", SLICE, "--spot", "--zones", f"{FIRST_ZONE},{SECOND_ZONE}", "--max-usd", "40", "--yes"]
    with site.started("run", "job.yaml", *options, **SECRETS) as run:
        run.until(lambda: queued(site, FIRST_ZONE) == [FIRST], site, "a request in the queue")
        told.before_queue = cloud.bill()
        cloud.set_capacity(FIRST_ZONE, SLICE, 1)
        run.until(lambda: running(site, FIRST), site, "the first slice")
        run.until(lambda: look_at_processes(told) or SAVED_STEP in saved_steps(site), site, "a checkpoint")
        told.listed = site.forerun("ps", "--json", XDG_CONFIG_HOME=str(site.folder / "another laptop"))
        look_at_files(told)
        # The machines disappear without a notice, and their zone has no other ones. The API does not tell when it took
        # them: forerun counts until it sees it. The clock of the bill stands still for that time, so the figures differ
        # by at most 5 seconds of forerun's clock, which is less than half a cent.
        cloud.set_capacity(FIRST_ZONE, SLICE, 0)
        cloud.run_clock(0)
        cloud.preempt(FIRST)
        run.until(lambda: queued(site, FIRST_ZONE) == [SECOND], site, "a second request in the first zone")
        cloud.run_clock(1)
        site.release()
        cloud.advance(601)  # the longest wait in one zone if there is another one
        run.until(lambda: running(site, THIRD), site, "a slice in the second zone")
        told.exit_code = run.wait(site)
        told.output = run.output
    assert told.exit_code == 0, f"{told.output}\n{site.logs()}"
    return told


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


def saved_steps(site: Site) -> set[int]:
    """Return the steps of the checkpoints that are complete in the bucket."""
    names = [name for name in site.object_names() if name.startswith(f"runs/{NAME}/commits/")]
    return {json.loads(site.read(name))["body"].get("step") for name in names}


def look_at_processes(told: Story) -> None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            told.commands.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    time.sleep(0.1)


def look_at_files(told: Story) -> None:
    """Record who may read the private files of the hosts while they train."""
    for folder in told.site.host_folders():
        state = folder / "var/lib/forerun"
        for name in ("secret", "environment", "inbox", "job", "."):
            found = (state / name).stat()
            told.private[f"{folder.parent.name}:{name}"] = (oct(found.st_mode & 0o777), found.st_uid)
        told.secret = (state / "secret").read_text().strip()


def test_the_queue_costs_nothing(story: Story) -> None:
    assert story.before_queue == {}
    assert all(usd == 0.0 for name, usd in story.site.cloud.bill().items() if name == SECOND)


def test_another_laptop_lists_the_run(story: Story) -> None:
    assert story.listed is not None
    assert story.listed.returncode == 0, story.listed.stderr
    assert FIRST in story.listed.stdout
    assert FIRST_ZONE in story.listed.stdout


def test_the_bill_equals_the_summary_to_the_cent(story: Story) -> None:
    bill, summary = story.site.cloud.bill(), summary_of(story)
    assert sum(bill.values()) > 5 * CENT
    assert summary["actual"]["usd"] == pytest.approx(sum(bill.values()), abs=CENT / 2)
    found = {name: one["usd"] for name, one in zip(NAMES, summary["attempts"], strict=True)}
    assert found == {name: pytest.approx(bill.get(name, 0.0), abs=CENT / 2) for name in NAMES}
    assert found[THIRD] == pytest.approx(bill[THIRD], abs=1e-6), "the API tells when a slice was deleted"
    assert f"${summary['actual']['usd']:.2f}" in story.output


def test_the_run_moved_to_the_second_zone(story: Story) -> None:
    rentals = {one["name"]: one["zone"] for one in story.site.cloud.rentals() if one["ready_at"] is not None}
    assert rentals == {FIRST: FIRST_ZONE, THIRD: SECOND_ZONE}
    summary = summary_of(story)
    assert [one["end"] for one in summary["attempts"]] == ["preempted", "refused", "finished"]
    assert summary["actual"]["preemptions"] == 1


def test_nothing_remains(story: Story) -> None:
    site = story.site
    assert site.cloud.resources() == []
    assert all(one["ended_at"] is not None for one in site.cloud.rentals() if one["ready_at"] is not None)
    end = time.monotonic() + 60  # the cloud reports a slice as deleted while its machines still shut down
    while left := [line for line in processes() if "first_process.py" in line and str(site.folder) in line]:
        assert time.monotonic() < end, left
    listed = site.forerun("ps", "--json")
    assert listed.returncode == 0, listed.stderr
    assert not any(name in listed.stdout for name in NAMES)


def test_fetched_weights_equal_those_of_a_run_without_interruption(story: Story, tmp_path: Path) -> None:
    fetched = story.site.forerun("fetch", NAME)
    assert fetched.returncode == 0, fetched.stderr
    results = story.site.laptop / "runs" / NAME
    folder = uninterrupted(tmp_path / "oracle", story.site)
    expected = weights(folder / "export")
    assert expected, "the oracle has weights"
    assert weights(results / "export") == expected
    assert losses(results) == losses(folder / "runs" / NAME)
    assert len(losses(results)) == STEPS


def test_no_secret_is_where_others_can_read_it(story: Story) -> None:
    site = story.site
    hidden = [*SECRETS.values(), story.secret, TOKEN, private_key(site)]
    assert all(len(one) > 16 for one in hidden)
    assert any("forerun train" in line for line in story.commands), "the process lists were read"
    places = {
        "process lists": "\n".join(story.commands),
        "requests, with labels and metadata": json.dumps(site.cloud.requests()),
        "output": story.output,
        "hosts' logs": "\n".join(path.read_text(errors="replace") for path in log_files(site)),
        "bucket": "\n".join(site.read(name).decode(errors="replace") for name in site.object_names()),
    }
    assert {place for place, text in places.items() for one in hidden if one in text} == set()


def test_files_with_secrets_belong_to_root_alone(story: Story) -> None:
    site = story.site
    assert len(story.private) == 5 * HOSTS
    modes = {path.split(":")[1]: found for path, found in story.private.items()}
    assert {found for path, found in story.private.items() if path.endswith((":secret", ":environment"))} == {
        ("0o600", 0)
    }
    assert modes["inbox"][0] == "0o700"
    assert modes["."] == ("0o755", 0)
    found = set()
    for folder in site.host_folders():
        for path in folder.rglob("*"):
            if path.is_file() and any(one.encode() in path.read_bytes() for one in SECRETS.values()):
                found.add((path.relative_to(folder).as_posix(), oct(path.stat().st_mode & 0o777), path.stat().st_uid))
    assert found == {("var/lib/forerun/environment", "0o600", 0)}
    keys = list((site.folder / "config").rglob("id_ed25519"))
    assert [oct(key.stat().st_mode & 0o777) for key in keys] == ["0o600"]


def summary_of(story: Story) -> Any:
    return json.loads(story.site.read(f"runs/{NAME}/cloud/summary.json"))


def private_key(site: Site) -> str:
    """Return a line in the middle of the run's private key."""
    (key,) = (site.folder / "config").rglob("id_ed25519")
    return key.read_text().splitlines()[3]


def log_files(site: Site) -> list[Path]:
    return [path for folder in site.host_folders() for path in (folder / "var/log").rglob("*") if path.is_file()]


def processes() -> list[str]:
    found = Story(site=None)  # type: ignore[arg-type]
    look_at_processes(found)
    return sorted(found.commands)


def weights(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def uninterrupted(folder: Path, site: Site) -> Path:
    """Train the job with four processes on this machine, without a cloud, and export it. Return `folder`."""
    folder.mkdir()
    (folder / "text").symlink_to(site.laptop / "text")
    (folder / "job.yaml").write_text(JOB)
    (folder / "secret").write_text(secrets.token_hex(16))
    (folder / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = site.environment | QUICKLY
    train = site.command("train", "job.yaml", f"checkpoint.folder={folder / 'saved'}")
    train += ["--leader", f"127.0.0.1:{port}", "--secret", "secret"]
    started = []
    for host in range(HOSTS):
        with (folder / f"{host}.log").open("wb") as log:
            command = [*train, "--host", f"{host}/{HOSTS}"]
            started.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
    try:
        codes = [process.wait(240) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert codes == [0] * HOSTS, "".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
    export = site.command("export", str(folder / "runs" / NAME), "--to", str(folder / "export"))
    done = subprocess.run(
        export, cwd=folder, env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder
