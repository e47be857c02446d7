import hashlib
import stat
import subprocess

import pytest
from recording_reporter import RecordingReporter
from ssh_server import SSHD, free_port, new_key, ssh_server

from forerun.cloud.provider import CloudUnavailable, HostAddress
from forerun.cloud.setup.bundle import Bundle
from forerun.cloud.ssh import delivery
from forerun.cloud.ssh.connection import HostAccess, IapTunnel, Trouble, run_on, ssh_command
from forerun.cloud.ssh.delivery import deliver, setup_states
from forerun.errors import UserError
from forerun.reporter import SILENT

pytestmark = pytest.mark.skipif(SSHD is None, reason="needs openssh-server")
SECRET = "hf_verysecretvalue"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ssh_server(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "host/inbox").mkdir(parents=True)
    return tmp_path / "host"


def bundle(size: int = 10) -> Bundle:
    return Bundle({"environment": f"HF_TOKEN={SECRET}\n".encode(), "job/data": b"x" * size})


def test_a_bundle_arrives_complete_and_only_its_owner_can_read_it(server, folder):
    sent, lines = bundle(3_000_000), []
    deliver(
        sent, [server.address()], [[server.host_key]], server.identity, RecordingReporter(lines), folder=str(folder)
    )
    file = folder / "inbox/bundle.tar"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == sent.sha256
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.name for one in (folder / "inbox").iterdir()] == ["bundle.tar"]
    assert len(lines) == 1
    assert SECRET not in "".join(lines)


def test_a_host_that_has_accepted_a_bundle_gets_no_second_one(server, folder):
    (folder / "accepted").write_text("digest\n")
    deliver(bundle(), [server.address()], [[server.host_key]], server.identity, SILENT, folder=str(folder))
    assert list((folder / "inbox").iterdir()) == []


def test_a_bundle_that_is_damaged_on_its_way_is_not_stored(server, folder):
    class Damaged:
        sha256 = hashlib.sha256(b"complete").hexdigest()

        def write(self, stream):
            stream.write(b"complet")

    with pytest.raises(CloudUnavailable):
        deliver(
            Damaged(), [server.address()], [[server.host_key]], server.identity, SILENT, folder=str(folder),
            limit_seconds=0,
        )  # fmt: skip
    assert list((folder / "inbox").iterdir()) == []


def test_a_changed_host_key_stops_the_delivery(server, folder, tmp_path):
    other = " ".join(new_key(tmp_path / "other").split()[:2])
    waits: list[float] = []
    with pytest.raises(UserError) as error:
        deliver(
            bundle(),
            [server.address(0), server.address(1)],
            [[server.host_key], [other]],
            server.identity,
            SILENT,
            folder=str(folder),
            sleep=waits.append,
        )
    assert error.value.code == "E-CLOUD-037"
    assert "host 1" in error.value.what
    assert waits == []


def test_a_host_without_a_known_key_gets_nothing(server, folder):
    with pytest.raises(UserError) as error:
        deliver(bundle(), [server.address()], [[]], server.identity, SILENT, folder=str(folder))
    assert error.value.code == "E-CLOUD-036"
    with pytest.raises(CloudUnavailable):
        deliver(bundle(), [server.address()], [], server.identity, SILENT, folder=str(folder))
    assert list((folder / "inbox").iterdir()) == []


def test_a_delivery_waits_until_the_setup_has_begun(server, tmp_path):
    lines: list[str] = []
    deliver(
        bundle(),
        [server.address()],
        [[server.host_key]],
        server.identity,
        RecordingReporter(lines),
        folder=str(tmp_path),
        sleep=lambda _: (tmp_path / "inbox").mkdir(),
    )
    assert (tmp_path / "inbox/bundle.tar").exists()
    assert len(lines) == 2


def test_a_host_that_stays_unreachable_can_be_tried_later(server, folder):
    gone = HostAddress(1, "127.0.0.1", "", free_port())
    clock = iter(range(0, 100, 4))
    waits: list[float] = []
    with pytest.raises(CloudUnavailable, match="host 1"):
        deliver(
            bundle(),
            [server.address(), gone],
            [[server.host_key]] * 2,
            server.identity,
            SILENT,
            folder=str(folder),
            limit_seconds=8,
            now=lambda: next(clock),
            sleep=waits.append,
        )
    assert waits == [2.0]
    assert (folder / "inbox/bundle.tar").exists()


def test_the_setup_states_of_reachable_hosts(server, folder):
    (folder / "state").write_text("broken doctor failed\n")
    gone = HostAddress(1, "127.0.0.1", "", free_port())
    states = setup_states(
        [server.address(), gone], [[server.host_key], [server.host_key]], server.identity, folder=str(folder)
    )
    assert states == ["broken doctor failed", ""]


def test_a_wrong_user_key_is_told_apart_from_an_unreachable_host(server, tmp_path):
    new_key(tmp_path / "stranger")
    refused = run_on(HostAccess(server.address(), (server.host_key,), tmp_path / "stranger"), "true")
    assert (refused.exit_code, refused.trouble) == (255, Trouble.REFUSED_KEY)
    gone = run_on(HostAccess(HostAddress(0, "127.0.0.1", "", free_port()), (server.host_key,), server.identity), "true")
    assert gone.trouble is Trouble.UNREACHABLE
    failed = run_on(HostAccess(server.address(), (server.host_key,), server.identity), "echo no >&2; exit 7")
    assert (failed.exit_code, failed.errors, failed.trouble) == (7, "no", None)


def test_many_hosts_are_reached_in_batches(server, folder, monkeypatch):
    monkeypatch.setattr(delivery, "PARALLEL", 2)
    lines: list[str] = []
    hosts = [server.address(index) for index in range(5)]
    deliver(bundle(), hosts, [[server.host_key]] * 5, server.identity, RecordingReporter(lines), folder=str(folder))
    assert sorted(int(line.split()[1].rstrip(":")) for line in lines) == list(range(5))


def test_the_command_line_has_no_secret_and_trusts_only_pinned_keys(server, tmp_path):
    tunnel = IapTunnel("my-project", "us-east5-b")
    host = HostAddress(3, "10.0.0.7", "10.0.0.7", instance="t1v-n-1234-w-3")
    words = ssh_command(HostAccess(host, ("ssh-ed25519 AAAA",), tmp_path / "key", tunnel=tunnel), tmp_path, "true")
    options = {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}
    assert options["StrictHostKeyChecking"] == "yes"
    assert options["GlobalKnownHostsFile"] == "/dev/null"
    assert options["IdentitiesOnly"] == "yes"
    assert options["ProxyCommand"].split()[:5] == ["gcloud", "compute", "start-iap-tunnel", "t1v-n-1234-w-3", "%p"]
    assert words[words.index("-l") + 1] == "forerun"
    # OpenSSH itself accepts every option.
    shown = subprocess.run([words[0], "-G", *words[1:-1]], capture_output=True, text=True, check=True)
    assert "proxycommand gcloud compute start-iap-tunnel t1v-n-1234-w-3 %p --listen-on-stdin" in shown.stdout
