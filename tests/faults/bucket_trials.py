"""Trials of a bucket that misbehaves while a process saves into it; the modes stand in `bucket_proxy`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from bucket_proxy import Proxy
from gcs_server import BUCKET, bucket

HERE = Path(__file__).resolve().parent
ADDRESS = f"gs://{BUCKET}/runs/one/checkpoints"
EVERY = 400  # steps of 20 ms: an outage of OUTAGE_SECONDS ends before the next save is due
OUTAGE_SECONDS = 5.0  # longer than all tries of gcsfs and TensorStore, compressed
OUTAGES = ("refuse", "close", "hang", "slow")
KINDS = ("flaky", *OUTAGES, "reset", "lost", "kill", "tour")


@contextmanager
def proxied(seed: int) -> Iterator[tuple[Proxy, dict[str, str]]]:
    """A bucket of its own; the proxy, and the environment of a process that reaches the bucket through it."""
    with tempfile.TemporaryDirectory() as folder:
        (data := Path(folder) / "bucket").mkdir()
        with bucket(data) as environment:
            proxy = Proxy(environment["STORAGE_EMULATOR_HOST"], seed)
            with proxy.serve() as address:
                places = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), address)
                source = os.pathsep.join([str(HERE.parents[1] / "src"), *filter(None, sys.path)])
                yield proxy, {**os.environ, **environment, **places, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}


def saver(environment: dict[str, str], last: int, every: int, errors: IO[str]) -> subprocess.Popen[str]:
    """`errors` is a file: a pipe that nobody reads meanwhile would hold it up as soon as it is full."""
    command = [sys.executable, str(HERE / "bucket_saver.py"), ADDRESS, str(last), str(every)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)


def trial(kind: str, seed: int) -> dict[str, Any]:
    """One run with the fault, and one by the next owner: nothing committed is lost, and nothing is left over."""
    chance = random.Random(f"{kind} {seed}")
    plan, last, every = modes(kind, chance)
    with proxied(seed) as (proxy, environment), tempfile.TemporaryFile("w+") as errors:
        process = saver(environment, last, every, errors)
        committed, done = 0, None
        assert process.stdout is not None
        for line in process.stdout:
            about = json.loads(line)
            if about["kind"] == "committed":
                committed = max(committed, about["step"])
            elif about["kind"] == "step" and about["step"] in plan:
                proxy.mode = plan[about["step"]]
                if kind == "kill" and proxy.mode == "":
                    process.kill()
                    break
                if proxy.mode in OUTAGES:
                    threading.Timer(OUTAGE_SECONDS, setattr, (proxy, "mode", "")).start()
            elif about["kind"] in ("done", "failed"):
                done = about
        process.communicate()
        proxy.mode = ""
        after = saver(environment, 0, every, errors)
        lines = after.communicate(timeout=900)[0].splitlines()
        errors.seek(0)
        noise = errors.read()
        assert lines, noise
    return told(kind, seed, process.returncode, committed, done, json.loads(lines[0]), noise)


def modes(kind: str, chance: random.Random) -> tuple[dict[int, str], int, int]:
    """The proxy's mode from a step on, the last step, and the steps between saves."""
    if kind == "tour":
        return {1: "lost", 60: "reset", 95: "refuse", 155: "hang", 215: ""}, 240, 30
    if kind in ("flaky", "reset", "lost"):
        return {1: kind}, 120, 20
    begins = EVERY - chance.randrange(1, 20) + chance.choice([0, 25])
    if kind == "kill":
        return {begins: "refuse", begins + chance.randrange(20, 200): ""}, 2 * EVERY, EVERY // 4
    return {begins: kind}, 2 * EVERY, EVERY


def told(
    kind: str, seed: int, code: int, committed: int, done: dict[str, Any] | None, opened: dict[str, Any], errors: str
) -> dict[str, Any]:
    newest = done["steps"][-1] if done and "steps" in done else committed
    ok = opened["good"] and not opened["leftovers"] and not opened["skipped"] and (opened["restored"] or 0) >= newest
    about: dict[str, Any] = {"fault": f"bucket-{kind}", "trial": seed, "ok": ok and (kind == "kill" or code == 0)}
    if done:
        about |= {f"{key}_seconds": done.get(key) for key in ("save", "check", "waited")}
        about |= {"tries_failed": sum("try " in text for text in done.get("told", [])), "steps": done.get("steps")}
    about |= {"restored": opened["restored"], "committed": committed, "leftovers": opened["leftovers"]}
    noise = [line for line in errors.splitlines() if line.strip() and not line.startswith("I1")]
    return about | ({} if about["ok"] and not noise else {"stderr": "\n".join(noise)[-800:], "done": done})
