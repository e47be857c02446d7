"""Compare two drivers for buckets: TensorStore's key-value stores, and fsspec with gcsfs and s3fs.

    python bench/storage_drivers.py

Both read and write the same objects of the emulators of both services (gcp-storage-emulator, moto), one after the other
and in alternating order. A proxy adds 30 ms to each request. CPU seconds are those of this
process only; the emulators and the proxy are other processes. An emulator answers a few hundred requests per second, so
`seconds` of small reads show the emulator's limit, while `cpu_ms` shows the cost of a request for the host that trains.
Prints a table, and writes bench/results/storage_drivers.json.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
SIZE_BYTES = 8 << 20  # small: the emulator of Google Cloud Storage reads the whole object for each range
READY = "proxy on port "
IDLE_SECONDS = 0.02
CASES = {"8 KiB reads": (8 << 10, 128), "4 MiB reads": (4 << 20, 16)}  # bytes, requests at the same time
WRITES, WRITE_BYTES = 16, 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds that are added to each request")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT.parent / "tests" / "support")]
    emulators: Any = importlib.import_module("emulated_buckets")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, emulators.emulated_buckets(Path(folder)) as buckets:
        for protocol in ("gs", "s3"):
            with _late(protocol, args.latency):
                found += _measured(buckets.address(protocol), args.rounds)
    _print(found)
    (ROOT / "results" / "storage_drivers.json").write_text(json.dumps(found, indent=1) + "\n")


def _measured(address: str, rounds: int) -> list[dict[str, Any]]:
    """Measure both drivers on one bucket. The first use of each, which opens connections, is not counted."""
    drivers = {"TensorStore": _TensorStore(address), "fsspec": _Fsspec(address)}
    drivers["TensorStore"].write("data", os.urandom(SIZE_BYTES))
    results: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for name, driver in sorted(drivers.items(), reverse=bool(number % 2)):
            for case, (size, count) in CASES.items():
                step = (SIZE_BYTES - size) // count
                ranges = [(n * step, n * step + size) for n in range(count)]
                spent = _spent(lambda driver=driver, ranges=ranges: driver.read("data", ranges))
                results.setdefault((case, name), []).append(spent)
            body = os.urandom(WRITE_BYTES)
            names = [f"{name}-{number}-{n}" for n in range(WRITES)]
            spent = _spent(lambda driver=driver, names=names, body=body: driver.create(names, body))
            results.setdefault(("1 MiB creates", name), []).append(spent)
    counts = {case: count for case, (_, count) in CASES.items()} | {"1 MiB creates": WRITES}
    return [
        {
            "service": address.partition(":")[0],
            "case": case,
            "driver": driver,
            "requests": counts[case],
            "seconds": round(statistics.median(seconds for seconds, _ in spent[1:]), 4),
            "cpu_ms": round(statistics.median(cpu for _, cpu in spent[1:]) / counts[case] * 1e3, 4),
        }
        for (case, driver), spent in results.items()
    ]


def _spent(call: Callable[[], None]) -> tuple[float, float]:
    """Return the wall time and the CPU time of a call, in seconds."""
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - cpu


class _TensorStore:
    def __init__(self, address: str) -> None:
        from forerun.data.storage.bucket import BucketFolder

        self._folder = BucketFolder(f"{address}/bench")

    def write(self, name: str, body: bytes) -> None:
        self._folder.replace(name, body)

    def read(self, name: str, ranges: list[tuple[int, int]]) -> None:
        from forerun.data.storage.folder import FileRange

        bodies = self._folder.read_ranges([FileRange(name, *one) for one in ranges])
        assert [len(body) for body in bodies] == [stop - start for start, stop in ranges]

    def create(self, names: list[str], body: bytes) -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(names)) as threads:
            assert all(threads.map(lambda name: self._folder.create(name, body), names))


class _Fsspec:
    def __init__(self, address: str) -> None:
        if address.startswith("gs"):
            gcsfs: Any = importlib.import_module("gcsfs")
            self._files = gcsfs.GCSFileSystem(token="anon", endpoint_url=os.environ["STORAGE_EMULATOR_HOST"])
        else:
            s3fs: Any = importlib.import_module("s3fs")
            self._files = s3fs.S3FileSystem(
                key="x",
                secret="x",
                endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"],
                config_kwargs={"max_pool_connections": 64},
            )
        self._top = address.partition("//")[2] + "/bench"

    def read(self, name: str, ranges: list[tuple[int, int]]) -> None:
        starts, stops = ([one[side] for one in ranges] for side in (0, 1))
        bodies = self._files.cat_ranges([f"{self._top}/{name}"] * len(ranges), starts, stops, batch_size=64)
        assert [len(body) for body in bodies] == [stop - start for start, stop in ranges]

    def create(self, names: list[str], body: bytes) -> None:
        self._files.pipe({f"{self._top}/{name}": body for name in names}, mode="create", batch_size=64)


@contextmanager
def _late(protocol: str, seconds: float) -> Iterator[None]:
    """Add the latency to all requests of a service, by a proxy in a process of its own."""
    names = ("AWS_ENDPOINT_URL_S3",) if protocol == "s3" else ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
    before = {name: os.environ[name] for name in names}
    target = before[names[0]].rpartition(":")[2]
    command = [sys.executable, "-u", "-c", f"from storage_drivers import serve; serve({target}, {seconds})"]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert proxy.stdout is not None
    try:
        port = int(proxy.stdout.readline().removeprefix(READY))
        os.environ.update(dict.fromkeys(names, f"http://127.0.0.1:{port}"))
        yield
    finally:
        os.environ.update(before)
        proxy.kill()
        proxy.wait()
        proxy.stdout.close()


def serve(target: int, seconds: float) -> None:
    """Pass on connections to a port of this machine. What a client sends arrives later by `seconds`."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target, limit=1 << 22)

        async def passed(source: asyncio.StreamReader, to: asyncio.StreamWriter, delay: float) -> None:
            try:
                last = 0.0
                while data := await source.read(1 << 20):
                    if delay and time.monotonic() - last > IDLE_SECONDS:  # a new request, not a part of an upload
                        await asyncio.sleep(delay)
                    last = time.monotonic()
                    to.write(data)
                    await to.drain()
                to.close()
            except OSError:
                to.close()

        await asyncio.gather(passed(reader, there_writer, seconds), passed(there_reader, writer, 0))

    async def run() -> None:
        server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=1 << 22)
        print(f"{READY}{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()

    asyncio.run(run())


def _print(found: list[dict[str, Any]]) -> None:
    print(f"{'service':8} {'case':15} {'driver':12} {'requests':>8} {'seconds':>8} {'CPU ms/request':>15}")
    for one in found:
        columns = f"{one['requests']:8} {one['seconds']:8.3f} {one['cpu_ms']:15.3f}"
        print(f"{one['service']:8} {one['case']:15} {one['driver']:12} {columns}")


if __name__ == "__main__":
    main()
