"""Secrets, addresses, ownership, notices, locks and verdicts of a supervisor."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from error_assertions import raises_error
from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster
from recording_reporter import FailingReporter, RecordingReporter

from forerun.errors import StorageError, UserError
from forerun.hardware import maintenance_notice
from forerun.hardware.tpu_hosts import MAX_BYTES, TpuHosts, find_tpu_hosts
from forerun.supervise.free_tpu import require_free_tpu, require_free_tpu_for
from forerun.supervise.host_address import PORT, Hosts, bound_address, given, parse
from forerun.supervise.leader.leader_view import Member, RestartPolicy
from forerun.supervise.leader.verdicts import death, first_cause
from forerun.supervise.owner import Owner
from forerun.supervise.protocol.json_form import decode_from_leader, encode
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Ending, WorkerExit
from forerun.supervise.protocol.wire import SECRET_VARIABLE, read_secret


def test_a_secret_from_the_environment_does_not_stay_there() -> None:
    environment = {SECRET_VARIABLE: "0123456789abcdef", "HOME": "/"}
    assert read_secret(None, environment).mac(b"x") == read_secret(None, {SECRET_VARIABLE: "0123456789abcdef\n"}).mac(
        b"x"
    )
    assert environment == {"HOME": "/"}


def test_a_secret_file_is_private_long_enough_and_there(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    file.chmod(0o640)
    with raises_error("E-HOSTS-025") as caught:
        read_secret(file, {})
    assert caught.value.fix == f"chmod 600 {file}"
    file.chmod(0o600)
    read_secret(file, {})
    file.write_text("short")
    with raises_error("E-HOSTS-027"):
        read_secret(file, {})
    with pytest.raises(UserError, match="cannot be read"):
        read_secret(tmp_path / "none", {})
    with raises_error("E-HOSTS-024"):
        read_secret(None, {})


def test_addresses() -> None:
    assert parse("10.0.0.2", 1, 4) == Hosts(1, 4, "10.0.0.2", 8476)
    assert parse("tpu-0:9000", 0, 4) == Hosts(0, 4, "tpu-0", 9000)
    assert parse("[fd00::1]:9000", 0, 4).address == "[fd00::1]:9000"
    for wrong in ("0.0.0.0:8476", "[::]:8476", "host:port", ""):
        with pytest.raises(UserError):
            parse(wrong, 0, 4)
    for index, count in ((4, 4), (-1, 4), (0, 0)):
        with raises_error("E-HOSTS-008"):
            Hosts(index, count, "10.0.0.2", 8476)


def test_only_an_address_of_this_machine_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match="host 0 cannot listen"):
        bound_address("198.51.100.7")

    def debian(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    with raises_error("E-HOSTS-017"):
        bound_address("tpu-0")


def test_a_run_has_one_owner_until_it_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from forerun.supervise.owner import Owner\n"
        "owner = Owner(Path(sys.argv[1])); print(owner.next_attempt(), flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        with raises_error("E-HOSTS-019") as caught:
            Owner(tmp_path)
        assert f"process {other.pid} on {socket.gethostname()}" in caught.value.why
        other.kill()
    owner = Owner(tmp_path)
    assert [owner.next_attempt(), owner.next_attempt()] == [2, 3]
    owner.release()
    assert stat.S_IMODE((tmp_path / "supervise" / "owner").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", bytes(2), b"seven", b"\xff"])
def test_a_damaged_number_of_attempts_is_restored_from_the_log(tmp_path: Path, content: bytes) -> None:
    owner, told = Owner(tmp_path), list[str]()
    for number in (1, 2, 3):
        assert owner.next_attempt() == number
        owner.append_log({"kind": "start", "attempt": number})
    owner.release()
    with (tmp_path / "supervise" / "log.jsonl").open("ab") as log:
        log.write(b"\xff[1]\n[]\n{")
    (tmp_path / "supervise" / "attempt").write_bytes(content)
    owner = Owner(tmp_path, RecordingReporter(told))
    assert owner.next_attempt() > 3
    owner.release()
    assert len(told) == 1


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, str]]]:
    monkeypatch.setattr(maintenance_notice, "ANSWER_SECONDS", 60.0)  # an answer is never late here
    values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            self.send_header("Metadata-Flavor", values.get("flavor", "Google"))
            self.end_headers()
            self.wfile.write(values.get(self.path.rpartition("/")[2], "").encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", values
        server.shutdown()


def test_notices_of_the_cloud(metadata: tuple[str, dict[str, str]]) -> None:
    url, values = metadata
    assert maintenance_notice.announced(url) is None
    values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert maintenance_notice.announced(url) is None
    values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert maintenance_notice.announced(url) == ("the cloud will end this machine for maintenance", 60)
    values["preempted"] = "TRUE"
    assert maintenance_notice.announced(url) == ("the cloud preempts this machine", 30)
    values["flavor"] = "somebody else"
    assert maintenance_notice.announced(url) is None


def test_a_notice_is_told_once_and_nothing_is_watched_elsewhere(metadata: tuple[str, dict[str, str]]) -> None:
    url, values = metadata
    told: list[tuple[str, float]] = []
    watching = maintenance_notice.watch(url, lambda *about: told.append(about), every_seconds=0.01)
    assert not told
    values["preempted"] = "TRUE"
    watching.join(120)
    assert told == [("the cloud preempts this machine", 30)]
    maintenance_notice.watch("http://127.0.0.1:9", lambda *about: told.append(about)).join(120)
    assert len(told) == 1


def test_the_lock_of_a_dead_process_is_removed_and_a_live_one_named(tmp_path: Path) -> None:
    lock, proc, said = tmp_path / "lock", tmp_path / "proc", list[str]()
    (proc / "77" / "fd").mkdir(parents=True)
    (proc / "77" / "cmdline").write_bytes(b"python\0train.py")
    lock.touch()
    require_free_tpu(RecordingReporter(said), lock, proc, attached=lambda: None)
    assert lock.exists()
    (proc / "77" / "fd" / "3").symlink_to(lock)
    with raises_error("E-HOSTS-005", "77") as caught:
        require_free_tpu(RecordingReporter(said), lock, proc, attached=lambda: "/dev/accel0")
    assert "python train.py" in caught.value.why
    assert lock.exists()
    (proc / "77" / "fd" / "3").unlink()
    own = proc / str(os.getpid()) / "fd"
    own.mkdir(parents=True)
    (own / "3").symlink_to(lock)
    require_free_tpu(
        RecordingReporter(said), lock, proc, attached=lambda: "/dev/accel0"
    )  # an earlier run of this process
    assert lock.exists()
    (own / "3").unlink()
    require_free_tpu(RecordingReporter(said), lock, proc, attached=lambda: "/dev/accel0")
    assert not lock.exists()
    assert len(said) == 1


def test_a_process_with_some_chips_does_not_ask_for_the_whole_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a parallel sweep share a TPU, each with its own chips."""
    asked: list[str] = []
    machine = SimpleNamespace(absence=asked.append, attached_tpu=lambda: None)
    require_free_tpu_for("tpu", FailingReporter(), machine=machine)
    assert asked == ["tpu"]
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1")
    require_free_tpu_for("tpu", FailingReporter(), machine=machine)
    assert asked == ["tpu"]


def member(index: int, code: int | None, *, ended: bool = False, tail: str = "") -> Member:
    exit = None if code is None else WorkerExit(code, ended, tail)
    return Member(index, "a", f"vm-{index}", 100 + index, 0.0, exit=exit)


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ((-signal.SIGABRT, -signal.SIGKILL, 1), 1),
        ((1, 2, -signal.SIGABRT), 1),
        ((-signal.SIGABRT, 0, 1), 2),
        ((None, -signal.SIGABRT, None), 1),
        ((0, 75, None), None),
    ],
)
def test_a_death_is_told_by_its_cause(codes: tuple[int | None, ...], cause: int | None) -> None:
    found = first_cause([member(index, code) for index, code in enumerate(codes)])
    assert (found.index if found else None) == cause


def test_those_we_ended_have_not_died() -> None:
    found = first_cause([member(0, -9, ended=True), member(1, 1)])
    assert found is not None
    assert found.index == 1


def test_deaths_in_words() -> None:
    assert "SIGKILL (kill -9" in death(member(2, -9))
    text = death(member(1, 3, tail="Traceback ...\nValueError: no\n  for more run it again\n\n"))
    assert text == "the worker of host 1 (vm-1) exited with code 3: ValueError: no"
    assert "signal 60" in death(member(0, -60))


def test_a_host_that_lost_a_peer_is_not_the_cause() -> None:
    lost = member(0, 1, tail="JaxRuntimeError: INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited")
    crashed = member(1, 1, tail="ValueError: no")
    assert first_cause([lost, crashed]) == crashed
    assert first_cause([lost]) == lost
    assert "NCCL_DEBUG=INFO" in death(lost)
    assert "NCCL_DEBUG=INFO" not in death(crashed)


def test_restarts_without_progress_come_later_and_later() -> None:
    delays = [Limits().restart_delay_seconds(fruitless) for fruitless in range(1, 10)]
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_attempts_without_a_new_step_are_counted_and_those_of_a_failing_disk_by_the_clock() -> None:
    limits = Limits(restarts=2, storage=100.0)
    tries = RestartPolicy(limits).cut_short("first", reached=7, now=10.0)
    assert (tries.ending(), tries.delay_seconds(), tries.spoken()) == (None, 0, "restarting")
    tries = tries.cut_short("second", reached=5, now=11.0)
    assert tries.spoken() == "restart 2 of 2 without a new step, in 1.0 s"
    tries = tries.cut_short("third", reached=7, now=12.0, storage=True)
    assert tries.ending() is None
    assert tries.spoken() == "restart 3 without a new step, in 4.0 s, for 98.0 s at most"
    tries = tries.cut_short("fourth", reached=7, now=109.0, storage=True)
    assert tries.ending() is None
    tries = tries.cut_short("fifth", reached=7, now=110.0, storage=True)
    told = "given up: 5 attempts did not get beyond step 7, the last of them:"
    assert tries.ending() == Ending(70, f"{told}\n  1. third\n  2. fourth\n  3. fifth")
    tries = tries.cut_short("sixth", reached=8, now=111.0, storage=True)
    assert (tries.ending(), tries.best, tries.delay_seconds()) == (None, 8, 1)
    tries = tries.cut_short("seventh", reached=8, now=112.0)
    tries = tries.cut_short("eighth", reached=8, now=113.0)
    ending = tries.ending()
    assert ending is not None
    assert "3 attempts did not get beyond step 8\n  1. sixth" in ending.text


def test_an_ending_is_told_whole() -> None:
    ending = Ending.mistake(UserError("E-HOSTS-999", "what", why="why", fix="fix"))
    again = decode_from_leader(encode(ending))
    assert again == ending
    assert isinstance(again, Ending)
    with pytest.raises(UserError, match="what"):
        again.exit_code()
    full = Ending.mistake(StorageError("E-HOSTS-998", "full", why="why", fix="fix"))
    with pytest.raises(StorageError, match="full") as caught:
        full.exit_code()
    assert caught.value.exit_code == 74
    assert Ending(75, "bye").exit_code() == 75


def test_a_supervisor_never_imports_jax() -> None:
    program = (
        "import sys, forerun.supervise.supervisor, forerun.supervise.worker\n"
        "print([name for name in ('jax', 'numpy', 'orbax', 'pydantic') if name in sys.modules])"
    )
    source = str(Path(__file__).resolve().parents[3] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, text=True) == "[]\n"


@pytest.mark.parametrize(
    ("host", "leader", "what"),
    [
        ("1", "a:1", "E-HOSTS-011"),
        ("a/b", "a:1", "E-HOSTS-011"),
        (None, "a:1", "E-HOSTS-011"),
        ("0/2", None, "E-HOSTS-012"),
        ("2/2", "a:1", r"host 2 of 2 .*E-HOSTS-008"),
    ],
)
def test_half_an_address_on_the_command_line_is_refused(host: str | None, leader: str | None, what: str) -> None:
    with pytest.raises(UserError, match=what):
        given(host, leader)


def tpu(index: str, names: str, **more: str) -> Callable[[], TpuHosts | None]:
    environment = {"TPU_WORKER_ID": index, "TPU_WORKER_HOSTNAMES": names, **more}
    return lambda: find_tpu_hosts(environment, lambda name: None)


def test_a_host_of_a_tpu_slice_finds_its_number_and_its_leader() -> None:
    assert given("auto", None, tpu("3", "a,b,c,d")) == Hosts(3, 4, "a", PORT)
    assert given("auto", "10.0.0.9:9000", tpu("1", "a, b")) == Hosts(1, 2, "10.0.0.9", 9000)
    assert given("auto", None, tpu("0", "fd00::1,fd00::2")) == Hosts(0, 2, "fd00::1", PORT)
    assert given("auto", None, tpu("0", "localhost")) == Hosts()


def test_hosts_of_several_slices_have_the_numbers_that_jax_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    for slice_id, worker in ((0, 0), (0, 1), (2, 1)):
        more = {
            "MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": str(slice_id), "MEGASCALE_COORDINATOR_ADDRESS": "first",
        }  # fmt: skip
        for name, value in ({"TPU_WORKER_ID": str(worker), "TPU_WORKER_HOSTNAMES": "a,b"} | more).items():
            monkeypatch.setenv(name, value)
        found = given("auto", None, tpu(str(worker), "a,b", **more))
        assert (found.index, found.count) == (GkeTpuCluster.get_process_id(), GkeTpuCluster.get_process_count())
        assert found.leader == "first"


def test_the_metadata_server_names_the_hosts_of_a_tpu_vm(metadata: tuple[str, dict[str, str]]) -> None:
    url, values = metadata

    def attribute(name: str) -> str | None:
        return maintenance_notice.read(url, f"attributes/{name}", MAX_BYTES)

    names = [f"t1v-n-00000000-w-{number}" for number in range(64)]  # longer than a notice
    values |= {"agent-worker-number": "63", "worker-network-endpoints": ",".join(names)}
    assert find_tpu_hosts({}, attribute) == TpuHosts(63, tuple(names))
    values["worker-network-endpoints"] = "w0:1:10.0.0.1,w1:2:10.0.0.2"  # the older form
    values["agent-worker-number"] = "1"
    assert find_tpu_hosts({}, attribute) == TpuHosts(1, ("10.0.0.1", "10.0.0.2"))
    values["tpu-env"] = "ZONE: 'us-east5-b'\nMEGASCALE_NUM_SLICES: '2'\n"
    with raises_error("E-HOSTS-028"):
        find_tpu_hosts({}, attribute)
    values["tpu-env"] += "MEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.7:8080'\n"
    several = lambda: find_tpu_hosts({}, attribute)  # noqa: E731
    assert given("auto", None, several) == Hosts(3, 4, "10.0.0.7", PORT)


@pytest.mark.parametrize(
    "find",
    [
        lambda: find_tpu_hosts({}, lambda name: None),
        tpu("2", "a,b"),
        tpu("", "a,b"),
        tpu("-1", "a,b"),
        tpu("0", ""),
        tpu("0", "a,a"),
        tpu("0", "a,b", MEGASCALE_NUM_SLICES="2"),
        tpu("0", "a,b", MEGASCALE_NUM_SLICES="2", MEGASCALE_SLICE_ID="0"),
        tpu("0", "a,b", MEGASCALE_NUM_SLICES="2", MEGASCALE_SLICE_ID="2", MEGASCALE_COORDINATOR_ADDRESS="a"),
    ],
)
def test_hosts_that_the_tpu_does_not_name_clearly_are_rejected(find: Callable[[], TpuHosts | None]) -> None:
    with pytest.raises(UserError, match="--host auto"):
        given("auto", None, find)


def test_the_command_line_names_this_host() -> None:
    assert given(None, None) == Hosts()
    assert given("1/4", "10.0.0.2") == Hosts(1, 4, "10.0.0.2", PORT)
