"""Test `forerun run --on ssh:machines.yaml` on two existing machines: real hosts that no API knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts.namespaces import NamespaceMachines
from hosts.site import OWN, PACKAGES, QUICKLY, REPOSITORY, module_at, warm_packages

OMITTED = not os.environ.get("FORERUN_LONG_TESTS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(OMITTED, reason="takes minutes; FORERUN_LONG_TESTS=1 runs it"),
]

PORT = 2200
JOB = """\
name: own
model: {layers: 1, embed: 16, heads: 2}
data: text
sequence: 16
batch: 8
steps: 4
device: cpu
remat: none
checkpoint: {every: 2, folder: "gs://checkpoints/runs"}
sample: {tokens: 0}
"""
# What the owner of the machine has set up: root may log in with the owner's key, on another port.
OWNERS_SETUP = f"""#!/bin/bash
echo '@KEY@' >/etc/ssh/owner_keys
sed 's/^PermitRootLogin.*/PermitRootLogin yes/; s#^AuthorizedKeysFile.*#& /etc/ssh/owner_keys#' \\
  /etc/ssh/host/sshd_config >/etc/ssh/owner_config
/usr/sbin/sshd -f /etc/ssh/owner_config -o Port={PORT} -o ListenAddress=0.0.0.0
"""


@contextmanager
def agent(key: Path) -> Iterator[dict[str, str]]:
    """Start an ssh agent with the owner's key, as on a laptop."""
    socket = key.with_name("agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        wait_for(socket.exists)
        variables = {"SSH_AUTH_SOCK": str(socket)}
        subprocess.run(["ssh-add", "-q", str(key)], env=os.environ | variables, check=True)
        yield variables
    finally:
        process.terminate()
        process.wait()


def wait_for(condition: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_on_existing_machines(tmp_path: Path) -> None:
    warm_packages()
    laptop, key = tmp_path / "laptop", tmp_path / "owner"
    (laptop / "text").mkdir(parents=True)
    (laptop / "text/a.txt").write_text("It was the best of times, it was the worst of times. " * 50)
    (laptop / "job.yaml").write_text(JOB)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    setup = OWNERS_SETUP.replace("@KEY@", key.with_suffix(".pub").read_text().strip())
    emulator = module_at("gcs_server", REPOSITORY / "tests/support/gcs_server.py")
    with emulator.bucket(tmp_path / "bucket") as bucket, agent(key) as variables:
        machines = NamespaceMachines(
            folder=str(tmp_path / "hosts"),
            environment={
                **bucket,
                **QUICKLY,
                "FORERUN_SMOKE_SECONDS": "1",
                "UV_CACHE_DIR": str(PACKAGES / "uv"),
                "UV_OFFLINE": "1",
                "PYTHONPYCACHEPREFIX": str(PACKAGES / "pyc"),
                "JAX_COMPILATION_CACHE_DIR": str(PACKAGES / "jax-{host}"),
            },
            programs={"/usr/local/bin/uv": str(PACKAGES / "bin" / "uv")},
            shared=str(PACKAGES),
        )
        try:
            machines.start("own", "nowhere", 2, {"startup-script": setup}, "")
            wait_for(lambda: all(machines.host_keys("own")) and len(machines.host_keys("own")) == 2)
            lines = [
                f"  - {{address: root@{address}, port: {PORT}, internal: {internal}, host_key: {keys[0]}}}"
                for (address, internal), keys in zip(machines.addresses("own"), machines.host_keys("own"), strict=True)
            ]
            (laptop / "machines.yaml").write_text("\n".join(["machines:", *lines, ""]))
            environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
            environment |= bucket | variables | {"PYTHONPATH": str(REPOSITORY / "src"), "HF_TOKEN": "hf_of_the_owner"}
            environment |= {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
            done = subprocess.run(
                [sys.executable, "-P", "-m", "forerun", "run", "job.yaml", "--on", "ssh:machines.yaml", "--yes"],
                cwd=laptop,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
            changes = [folder / "changes" for folder in sorted((tmp_path / "hosts").iterdir())]
            logs = "\n".join(path.read_text() for one in changes for path in one.glob("var/log/forerun/*.log"))
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs[-6000:]}"
            record = tmp_path / "bucket/.cloudstorage/checkpoints/runs/own/cloud"
            finished = json.loads((record / "finished.json").read_text())
            assert "cloud/run/summary.json" in finished["files"]
            assert any(name.startswith("export/") for name in finished["files"])
            hosts = [json.loads(path.read_text()) for path in sorted(record.glob("hosts/*.json"))]
            assert [(one["host"], one["phase"], one["exit_code"]) for one in hosts] == [
                (0, "finished", 0),
                (1, "finished", 0),
            ]
            assert hosts[0]["step"] == 4
            assert json.loads(next(record.glob("attempts/001-end.json")).read_text())["usd"] == 0
            # The machines are free again, and have neither the secret nor the key of the run.
            for folder in changes:
                state = folder / "var/lib/forerun"
                # The tree shows changes of the machine: a removed file is absent, or a mark of its removal.
                left = {path.name for path in state.iterdir() if path.is_file() or path.is_dir()}
                assert not {"secret", "environment", "claim", "job", "inbox", "export", "agent-log.json"} & left, left
                assert (folder / "etc/default/forerun").read_text().count("TPU_WORKER") == 0
            assert "hf_of_the_owner" not in logs + done.stdout + done.stderr
        finally:
            machines.close()
