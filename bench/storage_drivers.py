"""Compare drivers for buckets: TensorStore's key-value stores, fsspec (gcsfs, s3fs) and obstore.

    pip install obstore                   # not a dependency; without it, its rows are missing
    python bench/storage_drivers.py       # about two minutes

The drivers read and write the same objects of the emulators of both services (gcp-storage-emulator, moto), in
alternating order, in one process. `ratio` is the median wall time divided by that of TensorStore in the same run: an
emulator is slower than a service, so only ratios are comparable. CPU time is that of the client process; the emulators
are other processes. Memory is measured in a process per driver, after 16 reads of 4 MiB together.
Prints a table, and writes bench/results/storage_drivers.json and storage_drivers.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forerun.storage.bucket import BucketFolder
from forerun.storage.folder import FileRange

ROOT = Path(__file__).parent
KIB, MIB = 1 << 10, 1 << 20
LARGE_BYTES = 8 * MIB  # the emulator of Google Cloud Storage reads the whole object for each range
SMALL_OBJECTS, LISTED_OBJECTS, CREATES = 32, 300, 16
Spans = Sequence[tuple[int, int]]


class TensorStoreDriver:
    def __init__(self, address: str) -> None:
        self.folder = BucketFolder(address)

    def read(self, name: str) -> bytes:
        return self.folder.read(name)

    def ranges(self, name: str, spans: Spans) -> list[bytes]:
        return self.folder.read_ranges([FileRange(name, *span) for span in spans])

    def create(self, names: list[str], body: bytes) -> None:
        with ThreadPoolExecutor(len(names)) as threads:
            assert all(threads.map(lambda name: self.folder.create(name, body), names))

    def create_existing(self, name: str) -> object:
        return self.folder.create(name, b"other")

    def list(self, folder: str) -> int:
        return len(self.folder.inside(folder).files())


class FsspecDriver:
    def __init__(self, address: str) -> None:
        if address.startswith("gs"):
            gcsfs: Any = importlib.import_module("gcsfs")
            self.files = gcsfs.GCSFileSystem(
                token="anon", endpoint_url=os.environ["STORAGE_EMULATOR_HOST"], use_listings_cache=False
            )
        else:
            s3fs: Any = importlib.import_module("s3fs")
            self.files = s3fs.S3FileSystem(
                key="x",
                secret="x",
                endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"],
                config_kwargs={"max_pool_connections": 64},
                use_listings_cache=False,
            )
        self.top = address.partition("//")[2]

    def read(self, name: str) -> bytes:
        return bytes(self.files.cat_file(f"{self.top}/{name}"))

    def ranges(self, name: str, spans: Spans) -> list[bytes]:
        starts, stops = ([span[side] for span in spans] for side in (0, 1))
        return list(self.files.cat_ranges([f"{self.top}/{name}"] * len(spans), starts, stops, batch_size=64))

    def create(self, names: list[str], body: bytes) -> None:
        self.files.pipe({f"{self.top}/{name}": body for name in names}, mode="create", batch_size=64)

    def create_existing(self, name: str) -> object:
        return self.files.pipe_file(f"{self.top}/{name}", b"other", mode="create")

    def list(self, folder: str) -> int:
        return len(self.files.find(f"{self.top}/{folder}"))


class ObstoreDriver:
    def __init__(self, address: str) -> None:
        self.module: Any = importlib.import_module("obstore")
        store: Any = importlib.import_module("obstore.store")
        bucket, _, prefix = address.partition("//")[2].partition("/")
        plain = {"allow_http": True}
        if address.startswith("gs"):
            account = {"gcs_base_url": os.environ["STORAGE_EMULATOR_HOST"], "disable_oauth": True}
            key = json.dumps(account | {"client_email": "", "private_key": "", "private_key_id": ""})
            self.store = store.GCSStore(bucket, prefix=prefix, service_account_key=key, client_options=plain)
        else:
            endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
            self.store = store.S3Store(
                bucket, prefix=prefix, endpoint=endpoint, region="us-east-1", client_options=plain
            )

    def read(self, name: str) -> bytes:
        return bytes(self.module.get(self.store, name).bytes())

    def ranges(self, name: str, spans: Spans) -> list[bytes]:
        with ThreadPoolExecutor(64) as threads:  # `get_ranges` merges near ranges, as forerun does itself
            return list(
                threads.map(lambda s: bytes(self.module.get_range(self.store, name, start=s[0], end=s[1])), spans)
            )

    def create(self, names: list[str], body: bytes) -> None:
        with ThreadPoolExecutor(len(names)) as threads:
            list(threads.map(lambda name: self.module.put(self.store, name, body, mode="create"), names))

    def create_existing(self, name: str) -> object:
        return self.module.put(self.store, name, b"other", mode="create")

    def list(self, folder: str) -> int:
        return sum(len(chunk) for chunk in self.module.list(self.store, f"{folder}/"))


DRIVERS: dict[str, type[Any]] = {"TensorStore": TensorStoreDriver, "fsspec": FsspecDriver, "obstore": ObstoreDriver}


def spans_of(size: int, count: int) -> Spans:
    step = (LARGE_BYTES - size) // count
    return [(number * step, number * step + size) for number in range(count)]


def measured(address: str, rounds: int) -> list[dict[str, Any]]:
    """Measure all drivers on one bucket. The first round, which opens connections, is not counted."""
    writer = TensorStoreDriver(address)
    writer.create(["large"], os.urandom(LARGE_BYTES))
    for first in range(0, LISTED_OBJECTS, 50):
        writer.create([f"listed/{number:04}" for number in range(first, first + 50)], b"0123456789" * 100)
    drivers: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, driver in DRIVERS.items():
        if name == "obstore" and importlib.util.find_spec("obstore") is None:
            continue
        try:
            drivers[name] = driver(address)
            drivers[name].create([f"probe-{name}"], b"x")
        except Exception as error:
            del drivers[name]
            text = " ".join(str(error).split())[:120]
            rows.append({"service": address[:2], "driver": name, "not_supported": f"{type(error).__name__}: {text}"})

    def cases(name: str, driver: Any, number: int) -> dict[str, tuple[int, Callable[[], object]]]:
        body = os.urandom(64 * KIB)
        names = [f"created/{name}-{number}-{n}" for n in range(CREATES)]
        small = [f"listed/{n:04}" for n in range(SMALL_OBJECTS)]
        return {
            "1 KB objects, one after the other": (SMALL_OBJECTS, lambda: [driver.read(one) for one in small]),
            "8 KiB ranges together": (32, lambda: driver.ranges("large", spans_of(8 * KIB, 32))),
            "4 MiB ranges together": (8, lambda: driver.ranges("large", spans_of(4 * MIB, 8))),
            "conditional creates of 64 KiB together": (CREATES, lambda: driver.create(names, body)),
            f"listing of {LISTED_OBJECTS} objects": (1, lambda: driver.list("listed")),
        }

    spent: dict[tuple[str, str], list[tuple[float, float]]] = {}
    counts: dict[str, int] = {}
    for number in range(rounds + 1):
        for name, driver in sorted(drivers.items(), reverse=bool(number % 2)):
            for case, (counts[case], call) in cases(name, driver, number).items():
                began, cpu = time.perf_counter(), time.process_time()
                call()
                seconds = time.perf_counter() - began, time.process_time() - cpu
                spent.setdefault((case, name), []).append(seconds)
    for (case, name), times in spent.items():
        wall, cpu = (statistics.median(one[side] for one in times[1:]) for side in (0, 1))
        base = statistics.median(one[0] for one in spent[case, "TensorStore"][1:])
        rows.append(
            {
                "service": address[:2],
                "case": case,
                "driver": name,
                "ms": round(wall / counts[case] * 1e3, 2),
                "cpu_ms": round(cpu / counts[case] * 1e3, 2),
                "ratio": round(wall / base, 2),
            }
        )
    for name, driver in drivers.items():
        rows.append({"service": address[:2], "driver": name, "memory_mib": memory_mib(name, address)} | answers(driver))
    return rows


def answers(driver: Any) -> dict[str, str]:
    """Return what a driver does in cases that need care."""

    def answer(call: Callable[[], Any]) -> str:
        try:
            result = call()
        except Exception as error:
            return type(error).__name__
        return f"{len(result[0])} bytes" if isinstance(result, list) else repr(result)

    return {
        "create_of_existing": answer(lambda: driver.create_existing("large")),
        "read_of_missing": answer(lambda: driver.read("missing")),
        "range_over_the_end": answer(lambda: driver.ranges("large", [(LARGE_BYTES - 10, LARGE_BYTES + 10)])),
    }


def memory_mib(name: str, address: str) -> int:
    """Return the memory that a driver adds to a process: its modules and 16 reads of 4 MiB together."""
    command = [sys.executable, __file__, "--memory", name, address]
    path = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    return int(ran.stdout.split()[-1])


def peak_mib() -> int:
    """Return the peak memory of this process. `ru_maxrss` would include that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) // KIB  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", nargs=2, metavar=("DRIVER", "ADDRESS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        before = peak_mib()
        driver = DRIVERS[arguments.memory[0]](arguments.memory[1])
        driver.ranges("large", spans_of(4 * MIB, 16))
        print(peak_mib() - before)
        return
    sys.path[:0] = [str(ROOT.parent / "tests" / "support")]
    emulators: Any = importlib.import_module("emulated_buckets")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, emulators.emulated_buckets(Path(folder)) as buckets:
        for protocol in ("gs", "s3"):
            rows += measured(f"{buckets.address(protocol)}/bench", arguments.rounds)
    result = {"rounds": arguments.rounds, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "rows": rows}
    (ROOT / "results" / "storage_drivers.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    (ROOT / "results" / "storage_drivers.md").write_text(text)
    print(text)


def table(result: dict[str, Any]) -> str:
    lines = [
        f"Drivers for buckets on emulators (`python bench/storage_drivers.py`; median of {result['rounds']} rounds, "
        f"{result['cores']} cores, load {result['load']}):",
        "",
        "| service | case | driver | ms | CPU ms | time / TensorStore |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['service']} | {row['case']} | {row['driver']} | {row['ms']:g} | {row['cpu_ms']:g} | {row['ratio']:g} |"
        for row in result["rows"]
        if "case" in row
    ]
    lines += [
        "",
        "| service | driver | memory | create of an existing object | read of a missing one | range over the end |",
        "| --- | --- | ---: | --- | --- | --- |",
    ]
    lines += [
        f"| {row['service']} | {row['driver']} | {row['memory_mib']} MiB | {row['create_of_existing']} "
        f"| {row['read_of_missing']} | {row['range_over_the_end']} |"
        for row in result["rows"]
        if "memory_mib" in row
    ]
    lines += [
        f"\n{row['driver']} on {row['service']}: {row['not_supported']}"
        for row in result["rows"]
        if "not_supported" in row
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
