"""Compare the program hash of every job in this repository with the recorded hashes.

    python bench/program_hashes.py                  # compare with tests/program_hashes.json
    python bench/program_hashes.py --write          # record the hashes of this jax release
    python bench/program_hashes.py --only examples/ # only jobs whose name contains this text

`plan` and `train` show this hash. A change that only moves code must not change any of them. Each job is lowered for
one CPU device, eight virtual CPU devices and a TPU slice; nothing is compiled. A job that cannot be lowered has the
code of its error in place of a hash. Hashes depend on the jax release, so each release has its own section in the file.
On a TPU the hash that `plan` shows also depends on the folder of jax, which its kernels contain; here it does not.

Jobs that name a model of the hub take the named size in its place, as in bench/recipes.py: a program depends on
dimensions, not on weights. The exit code is 1 if a hash differs, is new or is missing. Takes about five minutes of CPU
time; the TPU slice needs libtpu, but no TPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Settings of jax change programs (JAX_NUMPY_DTYPE_PROMOTION does), so only the defaults count.
for name in [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]:
    del os.environ[name]
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
os.environ["HF_HUB_OFFLINE"] = "1"

# Before other scripts of this folder are imported: they put `src` first on the path, and the installed code counts.
import forerun.run.train  # noqa: E402, F401

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "bench"), str(ROOT / "bench" / "accuracy")]

import guard  # noqa: E402
import jax  # noqa: E402
import loop_overhead  # noqa: E402
import methods_table  # noqa: E402
import qat  # noqa: E402
import recipes  # noqa: E402
import runs  # noqa: E402
import search_quality  # noqa: E402
import yaml  # noqa: E402

from forerun.config.load import load  # noqa: E402
from forerun.config.recipes import RECIPES, written  # noqa: E402
from forerun.config.schema import Job  # noqa: E402
from forerun.errors import UserError  # noqa: E402
from forerun.hardware.devices import choose  # noqa: E402
from forerun.hardware.slices import slice_named  # noqa: E402
from forerun.models.plugin import use_job_folder  # noqa: E402
from forerun.planner.compile.request import CompileRequest  # noqa: E402
from forerun.planner.compile.worker import program_for  # noqa: E402
from forerun.program.build import program_hash  # noqa: E402
from forerun.resolve.job_corpus import with_steps  # noqa: E402
from forerun.resolve.resolve_model import resolve_model  # noqa: E402
from forerun.resolve.resolved_job import ResolvedJob  # noqa: E402
from forerun.run.run_devices import program_on  # noqa: E402

RECORD = ROOT / "tests" / "program_hashes.json"
SLICE = "v5e-8"
PLACES = ("cpu-1", "cpu-8", SLICE)
# Overrides for jobs that name a folder which another job makes: the dimensions of that job.
OVERRIDES = {
    "examples/lora/job.yaml": ("model={layers: 3, embed: 96, heads: 4}", "data.tokenizer=bytes"),
}
# Jobs whose mesh needs more devices than the usual places have.
OWN_PLACES = {"bench/jobs/llama3.1-8b-1024-chips.yaml": ("cpu-1024",)}

Hashes = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Entry:
    """A job as a file with overrides, or as fields, and the places that it is lowered for."""

    name: str
    file: Path | None = None
    overrides: tuple[str, ...] = ()
    fields: dict[str, Any] | None = None
    places: tuple[str, ...] = PLACES

    def job(self) -> ResolvedJob:
        """Return the job with its vocabulary and steps filled in."""
        if self.file is None:
            return with_steps(resolve_model(Job.model_validate_json(json.dumps(self.fields))))
        loaded = load(self.file, self.overrides)
        use_job_folder(loaded.path.parent)
        return with_steps(resolve_model(loaded.job))


def entries(folder: Path) -> Iterator[Entry]:
    """Yield all jobs of the repository. Recipes are written to `folder` as `forerun init` writes them."""
    for file in sorted([*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "bench").rglob("*.yaml")]):
        name = file.relative_to(ROOT).as_posix()
        if "runs" not in file.relative_to(ROOT).parts:  # a run folder has a copy of its job
            yield Entry(name, file, OVERRIDES.get(name, ()), places=OWN_PLACES.get(name, PLACES))
    for recipe in RECIPES.values():
        file = folder / recipe.name / f"{recipe.name}.yaml"
        written(recipe, file)
        size = (f"model={recipes.SIZES[recipe.model]}",) if recipe.model in recipes.SIZES else ()
        yield Entry(f"recipe {recipe.name}", file, size)
    for name, (recipe_name, words) in methods_table.METHODS.items():
        file = folder / recipe_name / f"{recipe_name}.yaml"
        yield Entry(f"bench/methods_table.py {name}", file, (*methods_table.WORDS, *words))
    yield Entry("bench/guard.py here", fields=guard.HERE)
    yield Entry("bench/guard.py quickstart", fields=guard.QUICKSTART)
    yield Entry("bench/loop_overhead.py", fields=loop_overhead.JOB)
    for task in search_quality.TASKS:
        fields = {"data": "text", "steps": 1000, **task.job}
        yield Entry(f"bench/search_quality.py {task.name}", fields=fields)
    for name, scheme in qat.SCHEMES.items():
        model = {**yaml.safe_load(qat.MODEL), "vocab": 257}
        fields = {"model": model, "data": "text", "steps": qat.MORE, "sequence": 96, "batch": 32, "qat": scheme}
        yield Entry(f"bench/qat.py {name}", fields=fields | {"precision": {"compute": "float32"}, "remat": "none"})
    families = {run.family: run for run in reversed(runs.runs())}  # one run of each, to save time
    for family, run in sorted(families.items()):
        fields = {"data": "none", "steps": 1000, **run.job}
        yield Entry(f"bench/accuracy/runs.py {family}", fields=fields, places=(SLICE,))


def lowered_hash(entry: Entry, place: str) -> str:
    """Return the program hash of a job, or the code of the error that prevents it."""
    kind, _, count = place.partition("-")
    if kind == "cpu":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    try:
        job = entry.job()
        if kind == "cpu":
            program = program_on(job, choose("cpu", int(count)), None)
        else:
            jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*")  # no paths in the text of kernels
            program = program_for(CompileRequest(job, slice_named(place)))
    except UserError as error:
        return getattr(error, "code", type(error).__name__)
    return program_hash(program.trace().lower())


def hash_in_a_child(entry: Entry, place: str) -> str:
    """Return the hash from a new process: a second trace in one process turns arrays of the first into constants.

    The process is a fork, because importing jax takes longer than lowering. No backend is running here yet.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # jax warns of every fork
        child = context.Process(target=_send_hash, args=(sender, entry, place))
        child.start()
    sender.close()
    try:
        answer: str = receiver.recv()
    except EOFError:
        raise SystemExit(f"{entry.name} on {place}: the process ended without an answer") from None
    finally:
        child.join()
    return answer


def _send_hash(sender: Connection, entry: Entry, place: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtpu complains at length about a missing TPU
    try:
        sender.send(lowered_hash(entry, place))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}".splitlines()[0])


def hashes_of(wanted: list[Entry]) -> Hashes:
    """Return the hashes by name and place, and print each job as it is done."""
    found: Hashes = {}
    for number, entry in enumerate(wanted, 1):
        began = time.perf_counter()
        found[entry.name] = {place: hash_in_a_child(entry, place) for place in entry.places}
        shown = "  ".join(f"{place} {said}" for place, said in found[entry.name].items())
        print(f"{number}/{len(wanted)} {entry.name}: {shown}  {time.perf_counter() - began:.1f} s", flush=True)
    return found


def differences(recorded: Hashes, found: Hashes) -> list[str]:
    """Return one line for each hash that differs, is new or is missing."""
    pairs = sorted({(name, place) for hashes in (recorded, found) for name in hashes for place in hashes[name]})
    lines = []
    for name, place in pairs:
        before, now = (hashes.get(name, {}).get(place, "nothing") for hashes in (recorded, found))
        if before != now:
            lines.append(f"{name} on {place}: recorded {before}, now {now}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the hashes instead of comparing them")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only jobs with TEXT in their name")
    parser.add_argument("--on", action="append", default=[], choices=PLACES, help="only for this place")
    args = parser.parse_args()
    began = time.perf_counter()

    def chosen(name: str) -> bool:
        return not args.only or any(text in name for text in args.only)

    with tempfile.TemporaryDirectory() as work:
        wanted = [entry for entry in entries(Path(work)) if chosen(entry.name)]
        if args.on:
            wanted = [_only_on(entry, args.on) for entry in wanted]
        found = hashes_of(wanted)
    record: dict[str, Hashes] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    before = record.get(jax.__version__)
    seconds = f"{time.perf_counter() - began:.0f} s"
    if args.write:
        kept = before or {} if args.only or args.on else {}
        merged = {name: {**kept.get(name, {}), **found.get(name, {})} for name in {*kept, *found}}
        record[jax.__version__] = merged
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        print(f"recorded {sum(map(len, found.values()))} hashes in {seconds}")
        return 0
    if before is None:
        print(f"no hashes are recorded for jax {jax.__version__}: run with --write in a tree that is known to be right")
        return 1
    compared = {
        name: {place: said for place, said in hashes.items() if not args.on or place in args.on}
        for name, hashes in before.items()
        if chosen(name)
    }
    lines = differences(compared, found)
    print("\n".join(lines) or f"{sum(map(len, found.values()))} hashes are as recorded, in {seconds}")
    return 1 if lines else 0


def _only_on(entry: Entry, places: list[str]) -> Entry:
    kept = tuple(place for place in entry.places if place in places)
    return Entry(entry.name, entry.file, entry.overrides, entry.fields, kept)


if __name__ == "__main__":
    sys.exit(main())
