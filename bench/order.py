"""Cost of a resume in a large data set: the first batch of step 1,000,000, out of 10^9 documents on disk.

    python bench/order.py build FOLDER [--documents 1000000000]   # about 9 GB of offsets and plan; minutes
    python bench/order.py resume FOLDER [--step 1000000] [--warm] # in a new process: seconds and memory
    python bench/order.py rates                                   # planning, permutation and row building

The documents have 1 to 400 tokens. Their offsets (8 bytes each) and the packing plan are real files. The tokens are a
sparse file: reading them costs the same system calls as real tokens, but no disk space. `resume` first removes the
files from the page cache, as on a host that has just started; with --warm it does not. Writes bench/results/order.json
and order.md. Delete FOLDER afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.blocks import SUFFIX, BlockSums
from forerun.data.disk_array import DiskArray
from forerun.data.documents import DocumentCounts, InMemory
from forerun.data.order.batches import Batches
from forerun.data.order.permutation import permuted
from forerun.data.order.whole_documents import WholeDocuments

RESULTS = Path(__file__).parent / "results/order.json"
SEQUENCE, BATCH, LONGEST = 2048, 64, 400


@dataclass(frozen=True)
class Index:
    """Documents that are stored as two files: token ids and offsets."""

    ids: DiskArray
    offsets: DiskArray
    digest: str
    largest: int = 0
    masked: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def counts(self) -> DocumentCounts:
        raise NotImplementedError("a packing plan counts the documents itself")

    def begins(self, documents: ArrayLike) -> NDArray[np.int64]:
        return self.offsets.at(documents)

    def holding(self, addresses: ArrayLike) -> NDArray[np.int64]:
        return self.offsets.places_of(addresses) - 1

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        return self.ids.read(start, stop), None

    def read_many(
        self, starts: Sequence[int], stops: Sequence[int]
    ) -> list[tuple[NDArray[Any], NDArray[np.bool_] | None]]:
        return [self.read(start, stop) for start, stop in zip(starts, stops, strict=True)]


def opened(folder: Path) -> Index:
    ids, offsets = (
        DiskArray(folder / f"{name}.bin", np.dtype(dtype), (folder / f"{name}.root").read_text())
        for name, dtype in (("ids", "<u2"), ("offsets", "<i8"))
    )
    return Index(ids, offsets, f"order-{len(offsets) - 1}")


def build(folder: Path, documents: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng, total, some = np.random.default_rng(0), 0, 1 << 22
    with (folder / "offsets.bin").open("wb") as out:
        out.write(np.zeros(1, "<i8").tobytes())
        for begin in range(0, documents, some):
            lengths = rng.integers(1, LONGEST + 1, min(some, documents - begin))
            sums = total + np.cumsum(lengths)
            total = int(sums[-1])
            out.write(sums.astype("<i8").tobytes())
    with (folder / "ids.bin").open("wb") as out:
        out.truncate(2 * total)
    for name in ("ids", "offsets"):
        write_checksums(folder / f"{name}.bin")
    print(f"{documents:,} documents, {total:,} tokens; planning", flush=True)
    began, cpu = time.perf_counter(), time.process_time()
    rows = WholeDocuments(opened(folder), SEQUENCE, plan_folder=folder)
    seconds = time.perf_counter() - began
    plan_bytes = sum(file.stat().st_size for file in folder.glob("*/*"))
    said = {
        "documents": documents,
        "rows": len(rows),
        "padding_share": rows.report.padding_share,
        "plan_seconds": round(seconds, 1),
        "plan_bytes_per_document": round(plan_bytes / documents, 2),
        "plan_cpu_seconds": round(time.process_time() - cpu, 1),
    }
    (folder / "built.json").write_text(json.dumps(said))
    print(json.dumps(said, indent=1), flush=True)


def write_checksums(file: Path) -> None:
    """Write the checksums of the blocks of a file, and their root, next to it."""
    sums = BlockSums()
    with file.open("rb") as content:
        while data := content.read(1 << 24):
            sums.update(data)
    raw, root = sums.finish()
    file.with_name(file.name + SUFFIX).write_bytes(raw)
    file.with_suffix(".root").write_text(root)


def memory() -> dict[str, int]:
    """Return the peak, the anonymous and the file-mapped resident bytes of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0].startswith(("VmHWM", "Rss"))}
    return {"peak": found["VmHWM"], "anonymous": found["RssAnon"], "file_mapped": found["RssFile"]}


def _process_seconds() -> float:
    """Return the seconds since this process was started, including Python and imports."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def _forget(folder: Path) -> None:
    """Remove the files from the page cache."""
    for file in folder.rglob("*.bin"):
        with file.open("rb") as source:
            os.fsync(source.fileno())
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resume(folder: Path, step: int, warm: bool) -> None:
    if not warm:
        _forget(folder)
    before, began = memory(), time.perf_counter()
    rows = WholeDocuments(opened(folder), SEQUENCE, plan_folder=folder)
    batches = Batches(rows, seed=7, batch=BATCH)
    open_seconds = time.perf_counter() - began
    batch = batches.batch_at(step)
    seconds, after = time.perf_counter() - began, memory()
    assert batch.tokens.shape == (1, BATCH, SEQUENCE)
    said = json.loads((folder / "built.json").read_text()) | {
        "step": step,
        "open_seconds": round(open_seconds, 4),
        "first_batch_seconds": round(seconds, 4),
        "process_seconds_with_imports": round(_process_seconds(), 3),
        "rss_increase_bytes": after["peak"] - before["peak"],
        "anonymous_increase_bytes": after["anonymous"] - before["anonymous"],
        "file_mapped_increase_bytes": after["file_mapped"] - before["file_mapped"],
        "filled": float((np.asarray(batch.segments) > 0).mean()),
    }
    _keep("resume_warm" if warm else "resume", said)


def rates() -> None:
    """Measure and record rates per second of CPU time, which other load on the machine hardly affects."""
    rng = np.random.default_rng(0)
    began = time.process_time()
    permuted(np.arange(1 << 22), 10**9, 7)
    found: dict[str, Any] = {"permutation_places_per_second": round((1 << 22) / (time.process_time() - began))}
    for mean in (20, 200, 1000):
        lengths = rng.exponential(mean, 40_000_000 // mean).astype(np.int64) + 2
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        documents = InMemory(rng.integers(0, 50_000, offsets[-1]).astype(np.uint16), offsets)
        _ = documents.digest
        for sequence in (1024, 2048):
            began = time.process_time()
            rows = WholeDocuments(documents, sequence)
            planning = time.process_time() - began
            batches, count = Batches(rows, seed=1, batch=16), 0
            began = time.process_time()
            while time.process_time() - began < 1:
                batches.batch_at(count)
                count += 1
            seconds = time.process_time() - began
            found[f"mean {mean}, sequence {sequence}"] = {
                "planned_documents_per_second": round(len(documents) / planning),
                "batch_tokens_per_second": round(count * 16 * sequence / seconds),
                "padding_share": round(rows.report.padding_share, 4),
                "window": rows.window,
            }
    _keep("rates", found)


def _keep(name: str, said: dict[str, Any]) -> None:
    print(json.dumps(said, indent=1), flush=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | {name: said}, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(known | {name: said}))


def table(known: dict[str, Any]) -> str:
    """Return the table that docs/how-to/data.md includes, or an empty text until both kinds of resume are measured."""
    both = [known[name] for name in ("resume", "resume_warm") if name in known]
    if len(both) < 2:
        return ""
    rows = [
        ("open and first batch, seconds", *(f"{one['first_batch_seconds']:.2f}" for one in both)),
        ("with Python and imports, seconds", *(f"{one['process_seconds_with_imports']:.1f}" for one in both)),
        ("additional memory, MB", *(f"{one['rss_increase_bytes'] / 1e6:.0f}" for one in both)),
    ]
    said = "| | files not in the page cache | files in the page cache |\n| --- | ---: | ---: |\n"
    said += "".join(f"| {' | '.join(row)} |\n" for row in rows)
    first = both[0]
    return said + (
        f"\nThe index has 8 bytes per document, and the packing plan {first['plan_bytes_per_document']}. Planning all "
        f"{first['documents']:,} documents took {first['plan_cpu_seconds']:.0f} seconds of CPU time, once.\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["build", "resume", "rates"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--documents", type=int, default=10**9)
    parser.add_argument("--step", type=int, default=1_000_000)
    parser.add_argument("--warm", action="store_true")
    given = parser.parse_args()
    if given.what == "rates":
        rates()
    elif given.folder is None:
        parser.error("a folder is needed")
    elif given.what == "build":
        build(given.folder, given.documents)
    else:
        resume(given.folder, given.step, given.warm)
