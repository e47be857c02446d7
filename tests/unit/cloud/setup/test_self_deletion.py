"""A machine deletes its slice without an agent: the watch of the startup script, against a real HTTP server."""

import re
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from forerun.cloud.record.entries import AttemptEntry, CloudRun, Option
from forerun.cloud.setup.startup import LIMIT_MARGIN_SECONDS, SETUP_SECONDS, deletion_paths, startup_script

OPTION = Option("tpu", "v6e-16", "us-east5-b", "spot", 4, 10.8)
RUN = CloudRun("tiny", "gs://bucket/runs/tiny", "steps: 1\n", (OPTION,), 40.0, 0.0)
LIMIT = 7200
ATTEMPT = AttemptEntry(1, OPTION, "forerun-tiny-1", 0.0, LIMIT, 0.0)
DELETION = deletion_paths(ATTEMPT, "p")
PARENT = "/TPU/v2/projects/p/locations/us-east5-b"
REQUESTS = [f"{PARENT}/queuedResources/forerun-tiny-1?force=true", f"{PARENT}/nodes/forerun-tiny-1"]

# The clocks of the machine, and a `systemctl` that records its calls. `sleep` lets time pass and ends the watch.
FAKES = """
machine_up=$UP machine_wall=$WALL
uptime_seconds() { echo "$machine_up"; }
boot_id() { echo "$BOOT"; }
date() { echo "$machine_wall"; }
sleep() {
  machine_up=$((machine_up + $1)) machine_wall=$((machine_wall + $1 + WALL_ERROR))
  if [ "$machine_up" -ge "$UNTIL" ]; then exit 0; fi
}
curl() { case "$*" in *project-id) echo found-project;; *token) echo '{"access_token": "TOKEN", "expires_in": 9}';;
  *) echo "$machine_up" >>"$STATE_FOLDER/times"; command curl "$@";; esac; }
"""


class Machine:
    """A machine with its disk. Each `boot` runs the watch that the startup script writes."""

    def __init__(self, folder: Path, deletion: list[str], limit_seconds: int | None = LIMIT) -> None:
        self.folder, self.state, self.boots = folder, folder / "state", 0
        for name in ("state", "log", "units"):
            (folder / name).mkdir()
        script = startup_script(RUN, OPTION, deletion, limit_seconds)
        begin, end = script.index("uptime_seconds() {"), script.index("\nfolders() {")
        names = "SETUP_SECONDS|LIMIT_SECONDS|DELETION"
        values = re.findall(rf"^(?:{names})=(?:'[^']*'|\S*)$", script, re.MULTILINE)
        assert len(values) == 3
        text = f'set -Eeuo pipefail\nsystemctl() {{ echo "$*" >>{folder}/systemctl; }}\n'
        text += f"STATE_FOLDER={self.state}\nLOG_FOLDER={folder / 'log'}\nUNITS={folder / 'units'}\n"
        text += "\n".join(values) + "\n" + script[begin:end] + "\nstart_watch\n"
        subprocess.run(["bash"], input=text, text=True, check=True, timeout=60)

    def boot(
        self, up: int, until: int, *, wall: int = 1_800_000_000, wall_error: int = 0, new: bool = True
    ) -> list[int]:
        """Run the watch from one uptime to another. Return the uptimes at which it sent the first request."""
        self.boots += new
        requests: list[tuple[str, str]] = []

        class Api(BaseHTTPRequestHandler):
            def do_DELETE(self) -> None:
                requests.append((self.path, self.headers["Authorization"]))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        watch = (self.state / "watch.sh").read_text()
        assert watch.rstrip().endswith("\nwatch_slice")
        watch = watch.rstrip().removesuffix("watch_slice")
        values = f"UP={up} WALL={wall} WALL_ERROR={wall_error} BOOT=b00{self.boots} UNTIL={until}\n"
        (self.state / "times").write_text("")
        with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            base = f"http://127.0.0.1:{server.server_port}/"
            overrides = "".join(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api}={base}{api}/\n" for api in ("TPU", "COMPUTE"))
            text = f"{values}{overrides}{watch}{FAKES}watch_slice\n"
            done = subprocess.run(["bash"], input=text, text=True, capture_output=True, timeout=120)
            server.shutdown()
            thread.join()
        assert done.returncode == 0, done.stderr
        assert "TOKEN" not in done.stdout + done.stderr
        assert {authorization for _, authorization in requests} <= {"Bearer TOKEN"}
        self.requests = [path for path, _ in requests]
        return sorted({int(line) for line in (self.state / "times").read_text().splitlines()})

    def start_agent(self) -> None:
        (self.state / ".agent-started").touch()


def test_without_an_agent_the_slice_is_deleted(tmp_path: Path) -> None:
    machine = Machine(tmp_path, DELETION)
    assert machine.boot(30, SETUP_SECONDS) == []
    assert machine.boot(SETUP_SECONDS, SETUP_SECONDS + 30, new=False) == [SETUP_SECONDS]
    assert machine.requests == REQUESTS


def test_the_project_of_the_machine_and_repeated_requests(tmp_path: Path) -> None:
    attempt = replace(ATTEMPT, option=replace(OPTION, provider="compute"))
    machine = Machine(tmp_path, deletion_paths(attempt, None), limit_seconds=1200)
    assert machine.boot(1190, 1250) == [1220]  # a short limit also ends the setup
    parent = "/COMPUTE/projects/found-project/zones/us-east5-b"
    paths = [f"{parent}/instanceGroupManagers/forerun-tiny-1", f"{parent}/instances/forerun-tiny-1"]
    assert machine.requests == paths
    assert machine.boot(1220, 1300, new=False) == [1220, 1250, 1280]
    assert machine.requests == 3 * paths


def test_with_an_agent_the_slice_lives_until_its_limit(tmp_path: Path) -> None:
    """Whatever the agent does after its start: it may hang, or its unit may be lost."""
    machine = Machine(tmp_path, DELETION)
    machine.start_agent()
    end = LIMIT + LIMIT_MARGIN_SECONDS
    assert machine.boot(60, end - 30) == []
    assert machine.boot(end - 30, end + 40, new=False)[0] == end
    assert machine.requests[:2] == REQUESTS


def test_reboots_count(tmp_path: Path) -> None:
    """Each boot counts from its own start, and the time of a reboot counts by the clock."""
    machine = Machine(tmp_path, DELETION)
    machine.start_agent()
    wall = 1_800_000_000
    assert machine.boot(60, 3060, wall=wall) == []
    # 3030 s were counted last, at the wall time 2970 s. 120 s later, the machine has booted for 50 s.
    assert machine.boot(50, 3050, wall=wall + 2970 + 120) == []
    # Counted: 3030 + 120 + 2970 = 6120 s. The limit of 7500 s is 1380 s later, 1350 s in this boot.
    assert machine.boot(30, 1400, wall=wall + 2970 + 120 + 2970 + 30)[0] == 1380


@pytest.mark.parametrize("jump", [-(10**9), -7200, 7200, 10**9])
def test_a_clock_that_jumps_changes_nothing_within_a_boot(tmp_path: Path, jump: int) -> None:
    machine = Machine(tmp_path, DELETION)
    machine.start_agent()
    end = LIMIT + LIMIT_MARGIN_SECONDS
    assert machine.boot(60, end - 3000, wall_error=1000) == []
    assert machine.boot(end - 3000, end - 30, new=False, wall=1_800_000_000 + jump) == []
    assert machine.boot(end - 30, end + 10, new=False)[0] == end


def test_a_clock_that_jumps_during_a_reboot_adds_at_most_an_hour(tmp_path: Path) -> None:
    for name, jump, counted in (("back", -(10**6), 60), ("ahead", 10**8, 3600)):
        (tmp_path / name).mkdir()
        machine = Machine(tmp_path / name, DELETION)
        machine.start_agent()
        assert machine.boot(60, 100) == []  # the last count is 90
        first = LIMIT + LIMIT_MARGIN_SECONDS - 90 - counted + 60
        times = machine.boot(60, first + 40, wall=1_800_000_000 + jump)
        assert times
        assert first <= times[0] < first + 30


@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00", b"1e9 b001 9 9", b"-5 b001 9 9", b"x" * 100_000, b"08 b9 08 09\n"]
)
def test_a_damaged_count_is_replaced_by_the_uptime(tmp_path: Path, content: bytes) -> None:
    machine = Machine(tmp_path, DELETION)
    machine.start_agent()
    (machine.state / ".counted").write_bytes(content)
    end = LIMIT + LIMIT_MARGIN_SECONDS
    assert machine.boot(end, end + 20)[0] == end


def test_a_full_disk_does_not_end_the_watch(tmp_path: Path) -> None:
    machine = Machine(tmp_path, DELETION)
    machine.start_agent()
    (machine.state / ".counted.new").mkdir()
    end = LIMIT + LIMIT_MARGIN_SECONDS
    assert machine.boot(end - 60, end + 20)[0] == end


def test_without_a_limit_the_watch_ends_with_the_setup(tmp_path: Path) -> None:
    machine = Machine(tmp_path, DELETION, limit_seconds=None)
    assert machine.boot(SETUP_SECONDS, SETUP_SECONDS + 20) == [SETUP_SECONDS]
    machine.start_agent()
    assert machine.boot(10**6, 10**6 + 10**6, new=False) == []


def test_the_watch_is_a_unit_that_is_restarted(tmp_path: Path) -> None:
    machine = Machine(tmp_path, DELETION)
    unit = (tmp_path / "units/forerun-watch.service").read_text()
    assert f"ExecStart=/bin/bash {machine.state}/watch.sh\n" in unit
    assert "Restart=on-failure\n" in unit
    assert (tmp_path / "systemctl").read_text() == "daemon-reload\nstart forerun-watch\n"


def test_the_watch_starts_before_the_script_can_end_early() -> None:
    script = startup_script(RUN, OPTION, DELETION, LIMIT)
    commands = [line.split("#")[0].strip() for line in script.splitlines()]
    assert commands.index("start_watch") < commands.index("settings") < commands.index("folders")


@pytest.mark.parametrize("provider", ["ssh", "other"])
def test_machines_that_are_not_rented(provider: str, tmp_path: Path) -> None:
    deletion = deletion_paths(replace(ATTEMPT, option=replace(OPTION, provider=provider)), "p")
    assert deletion == []
    Machine(tmp_path, deletion)
    assert list((tmp_path / "units").iterdir()) == []
