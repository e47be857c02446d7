"""CPU time of tokenizing on one node through Ray, relative to the local pool of processes.

    python -P bench/ray_cost.py models/tokenizer.json texts/ [--megabytes 200] [--rounds 3]

The text becomes JSONL rows of 1 to 4 KB. Each measurement runs in its own process, with the same number of workers,
and the two engines alternate. CPU time is user and system time of that process and of all processes that it started,
directly or not: the fields utime, stime, cutime and cstime of /proc/PID/stat, summed over the tree while all of them
are alive. So the Ray node (GCS, raylet, agents, log monitor), its workers and their tokenization processes are counted.

Three ratios are reported:

- `tokenization`: the build of the large corpus, after a build of a small one, which starts the Ray workers.
- `build`: both builds, with the start of the Ray workers, but with a cluster that runs already.
- `everything`: also the start of the Ray node and of the driver's connection.

Prints one JSON line and writes bench/results/ray_cost.json and ray_cost.md. Exit code 1 if `tokenization` is above 1.1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

GOAL = 1.1
ROOT = Path(__file__).parent
SMALL_BYTES = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ending", default="*.txt", help="names of the texts")
    given = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory(prefix="ray-cost-") as folder:
        for name, size in (("small", SMALL_BYTES), ("large", given.megabytes * 1_000_000)):
            write_rows(given.texts, given.ending, size, Path(folder) / name)
        for number in range(given.rounds):
            for engine in ("local", "ray"):
                runs[engine].append(measured(engine, Path(folder), given.tokenizer, given.workers, number))
                print(json.dumps({"engine": engine} | runs[engine][-1]), flush=True)
    result = summary(runs) | {"megabytes": given.megabytes, "workers": given.workers, "cores": os.cpu_count()}
    print(json.dumps(result))
    file = ROOT / "results" / "ray_cost.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(result))
    raise SystemExit(result["tokenization"] > GOAL)


def measured(engine: str, folder: Path, tokenizer: str, workers: int, number: int) -> dict[str, Any]:
    """Return the CPU seconds of both builds by an engine, measured in a process of its own."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "run", engine, str(folder), tokenizer, str(workers)]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    run = subprocess.run([*command, str(number)], stdout=subprocess.PIPE, env=os.environ | quiet, check=True)
    found: dict[str, Any] = json.loads(run.stdout.decode().splitlines()[-1])
    return found


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of the rounds and their ratios."""
    assert len({one["store"] for many in runs.values() for one in many}) == 1, "all stores are the same"
    middle = {
        engine: {name: statistics.median(one[name] for one in many) for name in ("start", "small", "large")}
        for engine, many in runs.items()
    }
    ray, local = middle["ray"], middle["local"]
    return {
        "tokenization": round(ray["large"] / local["large"], 3),
        "build": round((ray["small"] + ray["large"]) / (local["small"] + local["large"]), 3),
        "everything": round(sum(ray.values()) / sum(local.values()), 3),
        "goal": GOAL,
        "median_cpu_seconds": middle,
        "rounds": runs,
    }


def table(result: dict[str, Any]) -> str:
    """Return the table that docs/how-to/large-data.md includes."""
    middle = result["median_cpu_seconds"]
    lines = [
        f"CPU seconds for {result['megabytes']} MB of text with {result['workers']} workers, median of "
        f"{len(result['rounds']['ray'])} rounds, measured alternately (`python -P bench/ray_cost.py`; goal: {GOAL}):",
        "",
        "| | local pool | one Ray node | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    parts = {
        "tokenization, with Ray workers that run": (lambda m: m["large"], "tokenization"),
        "with the start of the Ray workers": (lambda m: m["small"] + m["large"], "build"),
        "with the start of the Ray node": (lambda m: sum(m.values()), "everything"),
    }
    for name, (part, key) in parts.items():
        local, ray = part(middle["local"]), part(middle["ray"])
        lines.append(f"| {name} | {local:.1f} | {ray:.1f} | {result[key]:.2f} |")
    return "\n".join(lines) + "\n"


def run(engine: str, folder: Path, tokenizer: str, workers: int, number: str) -> None:
    """Build the small and the large corpus with an engine, and print the CPU seconds of each as JSON."""
    from forerun.config.schema import Part
    from forerun.data.source.sources import open_source
    from forerun.data.tokenizer import load_tokenizer
    from forerun.data.tokens.build import build
    from forerun.data.tokens.ray_cluster import ray_cluster
    from forerun.data.tokens.recipe import recipe_for
    from forerun.data.tokens.store import read_index
    from forerun.data.tokens.worker_pool import Pool

    recipe = recipe_for(load_tokenizer(tokenizer))
    used = tree_cpu_seconds()

    def builds(start: Any) -> None:
        begun = tree_cpu_seconds() - used
        found: dict[str, Any] = {"start": begun}
        for name in ("small", "large"):
            before = tree_cpu_seconds()
            source = open_source(Part(path=str(folder / name)))
            store = build(source, recipe, folder / f"{engine}-{number}", workers=workers, engine=start)
            found[name] = tree_cpu_seconds() - before
        digests = [unit["sides"]["train"]["digest"] for unit in read_index(store)["units"]]
        print(json.dumps(found | {"store": f"{len(digests)} units, {hash_of(digests)}"}), flush=True)

    if engine == "local":
        builds(Pool)
        return
    from ray.cluster_utils import Cluster

    node = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    with ray_cluster(cluster.address) as start:
        builds(start)
    cluster.shutdown()


def hash_of(texts: list[str]) -> str:
    import hashlib

    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def tree_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all its descendants, including those that have been waited for."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
                ticks[int(folder.name)] = sum(int(value) for value in fields[11:15])
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        total += ticks.get(process, 0)
        left += parents.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


def write_rows(texts: Path, ending: str, size: int, folder: Path) -> None:
    """Write rows of 1 to 4 KB of the texts of a folder to a file of about `size` bytes. Repeat the texts if needed."""
    folder.mkdir()
    written = count = 0
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        while written < size:
            for text in sorted(texts.rglob(ending)):
                content, at = text.read_text(encoding="utf-8", errors="ignore"), 0
                while at < len(content) and written < size:
                    length = 1000 + 977 * count % 3000
                    piece = content[at : at + length]
                    if not piece.isspace():  # a row without text is an error
                        written += file.write(json.dumps({"text": piece}) + "\n")
                    at, count = at + length, count + 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]), sys.argv[6])
    else:
        main()
