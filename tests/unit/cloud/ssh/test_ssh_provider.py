import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ssh_server import SSHD, new_key, ssh_server

from forerun.cloud.provider import CloudUnavailable, Failure, RequestRefused, SliceRequest, SliceState
from forerun.cloud.providers import provider_named
from forerun.cloud.ssh.ssh_provider import SshMachine, SshProvider, known_keys, machine_option, read_machines
from forerun.errors import UserError

needs_sshd = pytest.mark.skipif(SSHD is None, reason="needs openssh-server")
# Stands for the real startup script: it shows that it runs, and waits to be ended.
STARTUP = "#!/bin/bash\necho $$ >@/began\nsleep 300\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ssh_server(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture
def machines(server, tmp_path):
    """A file with one machine, which is this one; its file tree is `tmp_path`."""
    file = tmp_path / "machines.yaml"
    address = server.address()
    file.write_text(
        f"machines:\n  - {{address: {address.address}, port: {server.port}, host_key: {server.host_key}}}\n"
    )
    return str(file)


def request(zone: str, root: Path, name: str = "forerun-tiny-1") -> SliceRequest:
    metadata = {
        "startup-script": STARTUP.replace("@", str(root)),
        "ssh-keys": "forerun:ssh-ed25519 AAAA forerun",
        "forerun-folder": "gs://b/runs/it's",
    }
    return SliceRequest(name, "1 machine", zone, "on-demand", {"forerun-run": "tiny"}, metadata, "id")


@needs_sshd
def test_a_run_claims_machines_and_releases_them(server, machines, tmp_path):
    provider = SshProvider(identity=server.identity, root=str(tmp_path))
    wanted = request(machines, tmp_path)
    state = tmp_path / "var/lib/forerun"
    assert provider.status(wanted.name, machines).state is SliceState.ABSENT
    settings = tmp_path / "etc/default/forerun"
    settings.parent.mkdir(parents=True)
    settings.write_text("OWN=1\n")
    provider.create(wanted)
    provider.create(wanted)  # the answer to the first call may be lost
    keys = tmp_path / "home/forerun/.ssh/authorized_keys"
    assert keys.read_text() == "ssh-ed25519 AAAA forerun\n"
    assert keys.stat().st_mode & 0o077 == 0
    assert provider.status(wanted.name, machines).state is SliceState.READY
    (resource,) = provider.list()
    assert (resource.name, resource.zone, resource.costs_money) == (wanted.name, machines, False)
    assert resource.labels == {"forerun-run": "tiny"}
    assert resource.metadata == {"forerun-folder": "gs://b/runs/it's"}
    # Another controller sees the same state, and another run cannot take the machine.
    other = SshProvider([machines], server.identity, str(tmp_path))
    assert [one.name for one in other.list()] == [wanted.name]
    with pytest.raises(RequestRefused) as refused:
        other.create(replace(wanted, name="forerun-other-1"))
    assert refused.value.failure is Failure.CAPACITY
    assert wanted.name in str(refused.value)
    other.delete("forerun-other-1", machines)
    assert provider.status(wanted.name, machines).state is SliceState.READY
    for name in ("secret", "environment"):
        (state / name).write_text("secret")
    while not (tmp_path / "began").exists() or not (tmp_path / "began").read_text():
        time.sleep(0.02)  # the startup script runs in the background
    pid = int((tmp_path / "began").read_text())
    provider.delete(wanted.name, machines)
    provider.delete(wanted.name, machines)
    assert provider.status(wanted.name, machines).state is SliceState.ABSENT
    assert provider.list() == []
    assert sorted(one.name for one in state.iterdir()) == [".claim-lock"]
    assert keys.read_text() == "\n"
    assert settings.read_text() == "OWN=1\n"
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.02)  # it was ended


@needs_sshd
def test_machines_learn_their_place_among_the_hosts(server, tmp_path):
    file = tmp_path / "machines.yaml"
    address = server.address().address
    # The second name of the same machine stands for a second machine.
    second = address.replace("127.0.0.1", "localhost")
    lines = [
        f"  - {{address: {address}, port: {server.port}, internal: 10.0.0.1, host_key: {server.host_key}}}",
        f"  - {{address: {second}, port: {server.port}, host_key: {server.host_key}}}",
    ]
    file.write_text("\n".join(["machines:", *lines, ""]))
    provider = SshProvider(identity=server.identity, root=str(tmp_path))
    found = provider.addresses("x", str(file))
    assert [(one.index, one.address, one.internal) for one in found] == [
        (0, "127.0.0.1", "10.0.0.1"),
        (1, "localhost", "localhost"),
    ]
    assert provider.host_keys("x", str(file)) == [(server.host_key,)] * 2
    script = provider._claim(request(str(file), tmp_path), read_machines(file), 1)
    assert "VARIABLES='TPU_WORKER_ID=1\nTPU_WORKER_HOSTNAMES=10.0.0.1,localhost'" in script
    settings = tmp_path / "etc/default/forerun"
    settings.parent.mkdir(parents=True)
    settings.write_text("OWN=1\n")
    functions = script.partition('mkdir -p "$FOLDER"\n')[0]
    subprocess.run(["bash"], input=f'{functions}\nsettings "$VARIABLES"\nsettings "$VARIABLES"', text=True, check=True)
    # systemd has no comments after a value.
    values = [line for line in settings.read_text().splitlines() if not line.startswith("#")]
    assert values == ["OWN=1", "TPU_WORKER_ID=1", "TPU_WORKER_HOSTNAMES=10.0.0.1,localhost"]
    first, *_ = provider.requests(request(str(file), tmp_path))
    assert first["url"] == f"ssh://{address}:{server.port}"


@needs_sshd
def test_unreachable_and_unusable_machines(server, tmp_path):
    file = tmp_path / "machines.yaml"
    file.write_text("machines:\n  - {address: root@127.0.0.1, port: 1, host_key: ssh-ed25519 AAAA}\n")
    with pytest.raises(CloudUnavailable):
        SshProvider(identity=server.identity).status("x", str(file))
    new_key(tmp_path / "stranger")
    file.write_text(f"machines:\n  - {{address: root@127.0.0.1, port: {server.port}, host_key: {server.host_key}}}\n")
    with pytest.raises(UserError) as refused:
        SshProvider(identity=tmp_path / "stranger").status("x", str(file))
    assert refused.value.code == "E-CLOUD-039"
    other = " ".join(new_key(tmp_path / "other").split()[:2])
    file.write_text(f"machines:\n  - {{address: root@127.0.0.1, port: {server.port}, host_key: {other}}}\n")
    with pytest.raises(UserError) as changed:
        SshProvider(identity=server.identity).status("x", str(file))
    assert changed.value.code == "E-CLOUD-037"


@pytest.mark.parametrize(
    "text",
    [
        "machines: []",
        "hosts: [a]",
        "machines: [{port: 22}]",
        "machines: ['-oProxyCommand=x']",
        "machines: [{address: a, port: 0}]",
        "machines: [{address: a, host_key: 'nonsense'}]",
        "machines: [{address: a, zone: b}]",
        "machines: [a, root@a]",
    ],
)
def test_files_that_are_not_lists_of_machines(text, tmp_path):
    (tmp_path / "machines.yaml").write_text(text + "\n")
    with pytest.raises(UserError) as error:
        read_machines(tmp_path / "machines.yaml")
    assert error.value.code == "E-CLOUD-038"


def test_the_option_of_existing_machines_costs_nothing(tmp_path, monkeypatch):
    (tmp_path / "machines.yaml").write_text("machines: [root@a, b]\n")
    monkeypatch.chdir(tmp_path)
    option = machine_option("machines.yaml")
    assert (option.provider, option.hosts, option.usd_per_hour) == ("ssh", 2, 0.0)
    assert option.zone == str(tmp_path / "machines.yaml")
    assert provider_named("ssh").name == "ssh"


def test_host_keys_come_from_the_users_known_hosts(tmp_path, monkeypatch):
    key = " ".join(new_key(tmp_path / "key").split()[:2])
    stand_in = tmp_path / "ssh-keygen"
    known = tmp_path / "known_hosts"
    known.write_text(f"[box]:2222 {key}\n@revoked box {key}\n")
    # OpenSSH finds the user's file by the password database and not by HOME.
    stand_in.write_text(f'#!/bin/sh\nexec /usr/bin/ssh-keygen -f {known} "$@"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert known_keys(SshMachine("me@box", "box", 2222, ())) == (key,)
    assert known_keys(SshMachine("me@box", "box", 22, ())) == ()
    assert json.dumps(known_keys(SshMachine("box", "box", 22, ("ssh-rsa A",)))) == '["ssh-rsa A"]'
