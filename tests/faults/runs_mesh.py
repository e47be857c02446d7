"""A run that goes on with another mesh: `python tests/faults/runs_mesh.py PAIRS`, one JSON line per pair.

    python tests/faults/runs_mesh.py 30             # fifteen minutes on two cores

Trained for 10 steps on one mesh and for 50 more on another, over 1 to 16 virtual devices. The state as restored must be
the state as saved, array by array; the ledger must be the same; every loss must be within 1e-5, relative, of the run
that stayed on the first mesh. An impossible mesh must be refused in one line, before anything is compiled, and the run
must stay as it was.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"
    os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent))

from rig import print_lines
from runs import Bench, Run, arrays_digest, digest, state_digest

from forerun.checkpoint.log import Log
from forerun.storage.folder import LocalFolder

Mesh = tuple[int, int, int]
TURN, LAST = 10, 60
RELATIVE = 1e-5
JOB = """\
model: {{layers: 2, embed: 128, heads: 8}}
data: {{path: text, ledger: true}}
sequence: 64
batch: 16
steps: {steps}
device: cpu
optimizer: {{lr: 1e-3}}
precision: {{compute: float32}}
checkpoint: {{every: {every}, keep: 6}}
sample: {{tokens: 0}}
"""
# data x fsdp x tp; the first of a row is trained on, and then goes on with each of the others.
POSSIBLE: tuple[tuple[Mesh, tuple[Mesh, ...]], ...] = (
    ((1, 1, 1), ((2, 1, 1), (1, 4, 1), (1, 1, 8), (1, 16, 1))),
    ((1, 2, 1), ((1, 1, 1), (1, 1, 2), (2, 2, 2), (4, 2, 2))),
    ((2, 2, 1), ((1, 1, 1), (1, 4, 1), (1, 2, 4), (2, 4, 2))),
    ((1, 4, 2), ((8, 1, 1), (1, 2, 1), (1, 1, 4), (2, 2, 1))),
    ((2, 2, 2), ((1, 8, 1), (1, 1, 1), (1, 16, 1), (1, 2, 1))),
    ((2, 4, 2), ((1, 1, 2), (2, 2, 2), (16, 1, 1), (1, 4, 1))),
)
# From, to, devices that are there, and the word that the one line must hold.
IMPOSSIBLE: tuple[tuple[Mesh, Mesh, int, str], ...] = (
    ((1, 2, 1), (1, 3, 1), 4, "mesh 1x3x1 needs 3 devices"),
    ((2, 2, 1), (2, 2, 2), 4, "mesh 2x2x2 needs 8 devices"),
    ((1, 1, 1), (1, 3, 1), 3, "batch=16 does not divide over 3"),
    ((1, 4, 2), (1, 1, 3), 3, "mesh.tp=3 does not divide the model's 8 heads"),
    ((2, 2, 2), (1, 1, 16), 16, "mesh.tp=16 does not divide the model's 8 heads"),
    ((2, 4, 2), (1, -1, 3), 16, "do not divide by 3"),
)


def pairs(count: int) -> list[tuple[Mesh, Mesh, int, str]]:
    """An even choice of so many: all of them are 30."""
    every = [(first, other, size(other), "") for first, others in POSSIBLE for other in others] + list(IMPOSSIBLE)
    return [every[index * len(every) // count] for index in range(min(count, len(every)))]


def size(mesh: Mesh) -> int:
    return mesh[0] * mesh[1] * mesh[2]


def words(mesh: Mesh) -> list[str]:
    return [f"mesh.{axis}={number}" for axis, number in zip(("data", "fsdp", "tp"), mesh, strict=True)]


def named(mesh: Mesh) -> str:
    return "x".join(map(str, mesh))


def trained(bench: Bench, mesh: Mesh) -> Run:
    """The run that stays on its mesh; once for all pairs that begin with it."""
    run = bench.run(f"stays-{named(mesh)}")
    if not run.folder.exists():
        with run:
            run.start(*words(mesh), devices=size(mesh))
            run.finish()
    return run


def turned(bench: Bench, stays: Run, name: str) -> Run:
    """As if it had been killed right after the commit of step TURN."""
    run = bench.run(name)
    shutil.copytree(stays.folder, run.folder)
    (run.folder / "summary.json").unlink()
    for commit in Log(LocalFolder(run.checkpoints)).commits():
        if commit.step > TURN:
            Log(LocalFolder(run.checkpoints)).remove(commit)
            shutil.rmtree(run.checkpoints / commit.folder)
    return run


def possible(bench: Bench, number: int, first: Mesh, other: Mesh) -> dict[str, Any]:
    stays = trained(bench, first)
    with turned(bench, stays, f"turned-{number}") as run:
        same = restored_digest(run, other) == state_digest(run.checkpoints)
        run.start(*words(other), devices=size(other))
        run.finish()
        assert run.resumed_at() == [TURN]
        mine, theirs = ({k: float.fromhex(v) for k, v in one.losses().items()} for one in (run, stays))
        assert list(mine) == list(theirs) == list(range(1, LAST + 1))
        worst = max(abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in mine)
        ledger = digest(run.folder / "ledger.jsonl") == digest(stays.folder / "ledger.jsonl")
        shutil.rmtree(run.folder)
    return {
        "state_equal": same,
        "ledger_equal": ledger,
        "worst_relative": worst,
        "ok": same and ledger and worst <= RELATIVE,
    }


def restored_digest(run: Run, mesh: Mesh) -> str:
    """Restored as the loop does it, into the shards of this mesh."""
    from forerun.checkpoint.reader import Reader
    from forerun.config.load import load
    from forerun.hardware.devices import choose
    from forerun.resolve.resolved_job import ResolvedJob
    from forerun.run.run_devices import program_on

    job = load(run.folder / "job.yaml", words(mesh)).job
    program = program_on(ResolvedJob(job), choose("cpu", size(mesh)), None)
    return arrays_digest(Reader(run.checkpoints).restore(TURN, program.state))


def impossible(bench: Bench, number: int, first: Mesh, other: Mesh, devices: int, told: str) -> dict[str, Any]:
    stays = trained(bench, first)
    with turned(bench, stays, f"turned-{number}") as run:
        before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
        run.start(*words(other), devices=devices)
        code = run.process.wait(120)
        said = run.said_now()
        untouched = before == {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
        shutil.rmtree(run.folder)
    what = next((line for line in said.splitlines() if line.startswith("error:")), "")
    compiled = any(f"\n{phase} ..." in said for phase in ("trace", "lower", "compile"))
    good = code == 2 and told in what and not compiled and untouched
    return {"code": code, "told": what, "compiled": compiled, "untouched": untouched, "ok": good}


def trials(count: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder, "bench"), steps=LAST, every=TURN, job=JOB)
        for number, (first, other, devices, told) in enumerate(pairs(count)):
            about = {"fault": "mesh", "trial": number, "from": named(first), "to": named(other), "devices": devices}
            if told:
                yield {**about, "possible": False, **impossible(bench, number, first, other, devices, told)}
            else:
                yield {**about, "possible": True, **possible(bench, number, first, other)}


if __name__ == "__main__":
    sys.exit(print_lines(trials(int(sys.argv[1]))))
