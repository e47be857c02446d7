"""Test the hosts themselves with the tools that a user has: ssh, curl and systemctl, and with google-auth."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts.metadata import TOKEN
from hosts.namespaces import NamespaceMachines

SLICE = "forerun-hosts-1"
UNIT = """[Unit]
Description=A service of the test

[Service]
ExecStart=/bin/bash -c 'echo started as $${NAME} >&2; trap "echo saved; exit 75" TERM; sleep 600 & wait'
WorkingDirectory=/var/lib
Environment=NAME=first
EnvironmentFile=-/etc/default/forerun
Restart=on-failure
RestartSec=100ms
RestartPreventExitStatus=75
SuccessExitStatus=75
StandardOutput=append:/var/log/service.log
StandardError=append:/var/log/service.log

[Install]
WantedBy=multi-user.target
"""


@pytest.fixture(scope="module")
def machines(real_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NamespaceMachines]:
    key = tmp_path_factory.mktemp("key") / "identity"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    found = NamespaceMachines(folder=str(tmp_path_factory.mktemp("hosts")), environment={"NAME": "second"})
    found.key = key  # type: ignore[attr-defined]
    keys = f"forerun:{key.with_suffix('.pub').read_text()}"
    script = "#!/bin/bash\necho once >> /var/log/boots\nid -u > /var/lib/user\nexit 7\n"
    try:
        found.start(SLICE, "us-east5-b", 2, {"ssh-keys": keys, "startup-script": script, "note": "a b"}, "v6e-8")
        wait_for(lambda: all(found.host_keys(SLICE)) and len(found.host_keys(SLICE)) == 2)
        yield found
    finally:
        found.close()


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def on_host(machines: NamespaceMachines, index: int, command: str) -> str:
    """Run a command as root on a host."""
    pid = machines.pid(SLICE, index)
    enter = ["nsenter", "--target", str(pid), "--all", f"--root=/proc/{pid}/root", "--wd=/"]
    done = subprocess.run([*enter, "bash", "-c", command], capture_output=True, text=True, timeout=60)
    return done.stdout


def by_ssh(machines: NamespaceMachines, index: int, known: Path, command: str) -> subprocess.CompletedProcess[str]:
    options = ["-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes"]
    key = machines.key  # type: ignore[attr-defined]
    address = machines.addresses(SLICE)[index][0]
    return subprocess.run(
        ["ssh", "-F", "none", "-i", str(key), *options, f"forerun@{address}", command], capture_output=True, text=True
    )


def test_ssh_accepts_only_the_published_host_key(machines: NamespaceMachines, tmp_path: Path) -> None:
    known = tmp_path / "known"
    address = machines.addresses(SLICE)[1][0]
    known.write_text(f"{address} {machines.host_keys(SLICE)[1][0]}\n")
    done = by_ssh(machines, 1, known, "id -un; hostname; exit 7")
    assert (done.returncode, done.stdout.split()) == (7, ["forerun", f"{SLICE}-w-1"])
    known.write_text(f"{address} {machines.host_keys(SLICE)[0][0]}\n")
    assert by_ssh(machines, 1, known, "true").returncode == 255


def test_the_uptime_of_a_host_begins_with_its_start(machines: NamespaceMachines, tmp_path: Path) -> None:
    hosts_file = tmp_path / "known"
    hosts_file.write_text(f"{machines.addresses(SLICE)[0][0]} {machines.host_keys(SLICE)[0][0]}\n")
    uptime = float(by_ssh(machines, 0, hosts_file, "cut -d ' ' -f 1 /proc/uptime").stdout)
    began = (machines.folder / f"{SLICE}-0" / "host.json").stat().st_mtime
    assert 0 < uptime <= time.time() - began + 2


def test_hosts_reach_each_other_and_have_own_files(machines: NamespaceMachines) -> None:
    other = machines.addresses(SLICE)[1][1]
    kind, key = machines.host_keys(SLICE)[1][0].split()
    assert on_host(machines, 0, f"ssh-keyscan -t ed25519 {other} 2>/dev/null").split() == [other, kind, key]
    on_host(machines, 0, "echo mine > /etc/mine; mkdir -p /var/lib/forerun; touch /var/lib/forerun/mine")
    assert on_host(machines, 1, "ls /etc/mine /var/lib/forerun 2>/dev/null") == ""
    assert not Path("/etc/mine").exists()
    assert on_host(machines, 1, f"ls {Path(__file__).parents[3]}") == "", "a host must not see the repository"


def test_the_startup_script_ran_once_as_root(machines: NamespaceMachines) -> None:
    wait_for(lambda: on_host(machines, 0, "cat /run/startup-script.exit") == "7")
    assert on_host(machines, 0, "cat /var/log/boots /var/lib/user") == "once\n0\n"


def test_metadata(machines: NamespaceMachines) -> None:
    get = "curl -s -H Metadata-Flavor:Google http://metadata.google.internal/computeMetadata/v1/instance/"
    assert on_host(machines, 1, f"{get}attributes/note") == "a b"
    assert on_host(machines, 1, f"{get}attributes/agent-worker-number") == "1"
    endpoints = on_host(machines, 0, f"{get}attributes/worker-network-endpoints").split(",")
    assert [one.split(":")[2] for one in endpoints] == [internal for _, internal in machines.addresses(SLICE)]
    assert "WORKER_ID: '1'" in on_host(machines, 1, f"{get}attributes/tpu-env").splitlines()
    assert json.loads(on_host(machines, 0, f"{get}service-accounts/default/token"))["access_token"] == TOKEN
    tree = json.loads(on_host(machines, 0, f"{get}?recursive=true".replace("?", "'?'")))
    assert tree["attributes"]["note"] == "a b"
    assert TOKEN not in json.dumps(tree)
    status = "curl -s -o /dev/null -w '%{http_code}' http://169.254.169.254/computeMetadata/v1/instance/id"
    assert on_host(machines, 0, status) == "403", "a request without the header must be refused"


def test_systemctl(machines: NamespaceMachines) -> None:
    on_host(machines, 0, f"cat > /etc/systemd/system/test.service <<'EOF'\n{UNIT}\nEOF\nsystemctl daemon-reload")
    show = "systemctl show test.service -p ActiveState -p ExecMainStatus -p NRestarts --value | tr '\\n' ' '"
    assert on_host(machines, 0, show) == "inactive 0 0 "
    on_host(machines, 0, "systemctl enable --now test.service")
    wait_for(lambda: "started" in on_host(machines, 0, "cat /var/log/service.log"))
    assert on_host(machines, 0, show) == "active 0 0 "
    quickly = "systemctl show test.service --property=ActiveState,NRestarts"
    assert on_host(machines, 0, quickly) == "ActiveState=active\nNRestarts=0\n"
    assert on_host(machines, 0, "cat /var/log/service.log") == "started as second\n", "the file has precedence"
    on_host(machines, 0, "kill -KILL $(systemctl show test -p MainPID --value)")
    wait_for(lambda: on_host(machines, 0, "cat /var/log/service.log").count("started") == 2)
    assert on_host(machines, 0, show) == "active 9 1 "
    on_host(machines, 0, "systemctl stop test")
    assert on_host(machines, 0, show) == "inactive 75 1 "
    assert on_host(machines, 0, "tail -1 /var/log/service.log; pgrep sleep") == "saved\n"


def test_a_notice_wakes_who_waits_for_it_and_a_stop_ends_all(machines: NamespaceMachines) -> None:
    machines.start("forerun-hosts-2", "us-east5-b", 1, {}, "v6e-4")
    wait_for(lambda: all(machines.host_keys("forerun-hosts-2")))
    pid = machines.pid("forerun-hosts-2", 0)
    get = ["nsenter", f"--net=/proc/{pid}/ns/net", "curl", "-s", "-i", "-H", "Metadata-Flavor:Google"]
    address = "http://169.254.169.254/computeMetadata/v1/instance/preempted"
    before = subprocess.run([*get, address], capture_output=True, text=True, check=True).stdout
    assert before.endswith("\n\nFALSE")
    etag = next(line.split()[1] for line in before.splitlines() if line.startswith("ETag"))
    question = f"{address}?wait_for_change=true&last_etag={etag}"
    with subprocess.Popen([*get, question], stdout=subprocess.PIPE, text=True) as waiting:
        machines.notice("forerun-hosts-2")
        assert waiting.communicate(timeout=60)[0].endswith("TRUE")
    machines.stop("forerun-hosts-2", kill=True)
    assert machines.addresses("forerun-hosts-2") == []
    assert not Path(f"/proc/{pid}").exists()
