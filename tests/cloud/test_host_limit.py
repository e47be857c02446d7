"""The limit of the agent alone: a run stops at its cap with a checkpoint, without a controller and an API limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake import FakeCloud, Fault

from forerun.cloud.control.billing import limit_seconds
from forerun.cloud.labels import resource_name, slice_labels
from forerun.cloud.provider import SliceRequest, SliceState
from forerun.cloud.providers import provider_named
from forerun.cloud.record.entries import AttemptEntry, HostEntry, Option, ReadyEntry
from forerun.cloud.record.run_files import RunFiles

ZONE, NAME, MAX_USD, PRICE = "us-east5-b", resource_name("tiny", 1), 5.0, 21.6
RUNNING = "ActiveState=active\nExecMainCode=0\nExecMainStatus=0\n"
# A service that saves a checkpoint when it is stopped, as `forerun train` does.
SYSTEMCTL = """#!/bin/sh
if [ "$1" = show ]; then cat {folder}/unit; fi
if [ "$1" = stop ]; then
  touch {folder}/checkpoint
  printf 'ActiveState=failed\\nExecMainCode=1\\nExecMainStatus=75\\n' > {folder}/unit
fi
"""


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def agents(folder: Path, cloud: FakeCloud, count: int, limit_seconds: int) -> Iterator[RunFiles]:
    """Run the agents of some hosts as processes, each with its own file tree and the same bucket folder."""
    files, processes = RunFiles(str(folder / "bucket")), []
    for host in range(count):
        root = folder / f"host{host}"
        (root / "usr/bin").mkdir(parents=True)
        (root / "var/lib/forerun").mkdir(parents=True)
        (root / "unit").write_text(RUNNING)
        (root / "usr/bin/systemctl").write_text(SYSTEMCTL.format(folder=root))
        (root / "usr/bin/systemctl").chmod(0o755)
        settings = {"folder": files.address, "attempt": 1, "hosts": 2, "host": host, "run_name": "tiny"}
        settings |= {"provider": "tpu", "resource": NAME, "zone": ZONE, "project": None}
        settings |= {"limit_seconds": limit_seconds}
        (root / "agent.json").write_text(json.dumps(settings))
        command = [sys.executable, "-P", "-m", "forerun.cloud.host", str(root / "agent.json"), "--root", str(root)]
        environment = {**os.environ, **cloud.environment(), "GCE_METADATA_HOST": "127.0.0.1:9"}
        with (root / "agent.log").open("wb") as log:
            processes.append(subprocess.Popen([*command, "--speed", "10"], env=environment, stdout=log, stderr=log))
    try:
        yield files
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("first", "is_forged"), [(0, False), (1, False), (0, True)])
def test_the_agent_alone_keeps_the_cap(tmp_path: Path, first: int, is_forged: bool) -> None:
    """With `first` = 1, the agent of host 0 is dead, and host 1 acts 15 s later.

    A forged record claims a limit of years and a later start of billing. It prolongs nothing.
    """
    with FakeCloud() as cloud:
        provider = provider_named("tpu", None, cloud.environment())
        option = Option("tpu", "v6e-8", ZONE, "on-demand", 2, PRICE)
        limit = limit_seconds(MAX_USD, 0.0, PRICE)
        assert limit is not None
        request = SliceRequest(NAME, "v6e-8", ZONE, "on-demand", slice_labels("tiny", 1), {}, "5b1d1c5e", limit)
        assert not provider.enforces_limit(request)
        with agents(tmp_path, cloud, 2, limit) as files:
            recorded_limit = 10**8 if is_forged else limit
            files.create_attempt(AttemptEntry(1, option, NAME, cloud.now(), recorded_limit, 0.0))
            if is_forged:
                files.create_ready(1, ReadyEntry(cloud.now() + 1e6))
            provider.create(request)
            wait_for(lambda: provider.status(NAME, ZONE).state is SliceState.READY)
            wait_for(lambda: len(files.hosts(1, 2)) == 2)
            wait_for(lambda: files.ready(1))
            ready_at = provider.status(NAME, ZONE).ready_at
            assert ready_at is not None
            ready = files.ready(1)
            assert isinstance(ready, ReadyEntry)
            assert is_forged or ready.at == ready_at
            if first == 1:  # the unit of the agent on host 0 is lost
                (tmp_path / "host0/unit").unlink()
                (tmp_path / "host0/usr/bin/systemctl").write_text("#!/bin/sh\nkill -9 $PPID\n")
            cloud.inject(Fault("error", "DELETE", count=2))
            cloud.advance(ready_at + limit - 60.0 + 15.0 * first - cloud.now())
            wait_for(lambda: (tmp_path / f"host{first}/checkpoint").exists())
            cloud.advance(30.0)
            wait_for(lambda: not cloud.resources())
        (usd,) = cloud.bill().values()
        assert 0.9 * MAX_USD < usd <= MAX_USD
        report = files.hosts(1, 2)[first]
        assert isinstance(report, HostEntry)
        assert (report.phase, report.exit_code) == ("stopped", 75)
        assert report.detail.startswith("budget")
