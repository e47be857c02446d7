"""Trials of libtpu's lock file with real processes: `live` is held, `dead` was held by a process that was killed,
`race` is taken while somebody else removes it. No TPU is needed: the machine is said to have one."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

from recording_reporter import RecordingReporter

from forerun.errors import UserError
from forerun.hardware.devices import Absence
from forerun.supervise import free_tpu
from forerun.supervise.free_tpu import require_free_tpu_for

KINDS = ("live", "dead", "race")
HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.{how}(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


class WithTpu:
    def absence(self, platform: str) -> Absence | None:
        return None

    def attached_tpu(self) -> str | None:
        return "/dev/accel0"


def holder(path: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD.format(how=how), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def trial(kind: str, seed: int) -> dict[str, Any]:
    chance = random.Random(f"lock {kind} {seed}")
    how, device = chance.choice(["flock", "lockf"]), chance.choice(["auto", "tpu", ("tpu",)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libtpu_lockfile"
        if kind == "race":
            path.touch()
            process = taken_meanwhile(path, how)
        else:
            process = holder(path, how)
        try:
            if kind == "dead":
                process.kill()
                process.wait()
            said: list[str] = []
            refused = verdict(device, path, said)
        finally:
            free_tpu.read_lock = READ
            process.kill()
            process.communicate()
        there = path.exists()
    right = {
        "live": there and refused is not None and f"process {process.pid}" in refused,
        "dead": not there and refused is None and len(said) == 1,
        "race": there and refused is None and not said,
    }
    about = {"fault": f"lock-{kind}", "trial": seed, "lock": how, "device": device, "ok": right[kind]}
    return {**about, "told": refused or "".join(said)}


READ = free_tpu.read_lock


def taken_meanwhile(path: Path, how: str) -> subprocess.Popen[str]:
    """Looked at when nobody held it, and held from then on."""
    seen = READ(path)
    free_tpu.read_lock = lambda *_: seen
    return holder(path, how)


def verdict(device: Any, path: Path, said: list[str]) -> str | None:
    try:
        require_free_tpu_for(device, RecordingReporter(said), path, WithTpu())
    except UserError as error:
        return error.what
    return None
