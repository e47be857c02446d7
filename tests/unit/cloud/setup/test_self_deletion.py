"""A machine without an agent deletes its slice: the function of the startup script, against a real HTTP server."""

import re
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from forerun.cloud.record.entries import AttemptEntry, CloudRun, Option
from forerun.cloud.setup.self_deletion import deletion_paths
from forerun.cloud.setup.startup import startup_script

OPTION = Option("tpu", "v6e-16", "us-east5-b", "spot", 4, 10.8)
RUN = CloudRun("tiny", "gs://bucket/runs/tiny", "steps: 1\n", (OPTION,), 40.0, 0.0)
ATTEMPT = AttemptEntry(1, OPTION, "forerun-tiny-1", 0.0, 3600, 0.0)
FAKES = """\
set -u
STATE_FOLDER=$(mktemp -d)
pauses=0
sleep() { pauses=$((pauses + 1)); [ "$pauses" -le "$INACTIVE" ] || touch "$STATE_FOLDER/.agent-started"; }
curl() { case "$*" in *project-id) echo found-project;; *token) echo '{"access_token": "TOKEN", "expires_in": 9}';;
  *) command curl "$@";; esac; }
"""


def run_watch(deletion: list[str], inactive: int) -> list[tuple[str, str]]:
    """Run `watch_setup` with an agent that is inactive so many times. Return the requests with their authorization."""
    requests: list[tuple[str, str]] = []

    class Api(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            requests.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    script = startup_script(RUN, OPTION, deletion)
    function = re.search(r"^watch_setup\(\) \{\n.*?^\}\n", script, re.MULTILINE | re.DOTALL)
    settings = re.search(r"^SETUP_SECONDS=\S+\nDELETION=('[^']*'|\S+)\n", script, re.MULTILINE)
    assert function is not None
    assert settings is not None
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        base = f"http://127.0.0.1:{server.server_port}/"
        overrides = "".join(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api}={base}{api}/\n" for api in ("TPU", "COMPUTE"))
        text = f'INACTIVE={inactive}\n{FAKES}{overrides}{settings[0]}{function[0]}watch_setup\nrm -r "$STATE_FOLDER"\n'
        done = subprocess.run(["bash"], input=text, text=True, capture_output=True, timeout=60)
        server.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr
    assert "TOKEN" not in done.stdout + done.stderr
    return requests


def test_without_an_agent_the_slice_is_deleted() -> None:
    parent = "/TPU/v2/projects/p/locations/us-east5-b"
    assert run_watch(deletion_paths(ATTEMPT, "p"), inactive=1) == [
        (f"{parent}/queuedResources/forerun-tiny-1?force=true", "Bearer TOKEN"),
        (f"{parent}/nodes/forerun-tiny-1", "Bearer TOKEN"),
    ]


def test_the_project_of_the_machine_and_repeated_requests() -> None:
    attempt = replace(ATTEMPT, option=replace(OPTION, provider="compute"))
    parent = "/COMPUTE/projects/found-project/zones/us-east5-b"
    paths = [path for path, _ in run_watch(deletion_paths(attempt, None), inactive=2)]
    assert paths == 2 * [
        f"{parent}/instanceGroupManagers/forerun-tiny-1",
        f"{parent}/instances/forerun-tiny-1",
    ]


def test_with_an_agent_nothing_is_deleted() -> None:
    assert run_watch(deletion_paths(ATTEMPT, "p"), inactive=0) == []


@pytest.mark.parametrize("provider", ["ssh", "other"])
def test_machines_that_are_not_rented(provider: str) -> None:
    assert deletion_paths(replace(ATTEMPT, option=replace(OPTION, provider=provider)), "p") == []
