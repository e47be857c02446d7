"""Kill a node of a Ray cluster at 20 random moments, and the driver at 5, and compare the store each time.

    python -P tests/faults/ray_trials.py [--nodes 20] [--drivers 5] [--seed 22] [--tokenizer PATH/tokenizer.json]

The cluster has three nodes on this machine. All processes of one node get SIGKILL: its raylet, its Ray workers and the
tokenization processes. The head node is not killed, because a Ray cluster ends with its head. A moment is a random
number of finished units, and a random delay of up to a second after them: the moments then cover the complete build at
any load of the machine. A killed driver is started again.
The store must have the same files with the same bytes as one that worker processes of one machine built, and a unit
that was finished must not be built again. Writes tests/faults/results/ray.json after each trial; --resume does
not repeat the trials in that file. Exit code 1 if a trial failed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ray_rig import Driver, RayRig, contents, finished_units, marker, three_nodes, write_rows

RESULTS = Path(__file__).parent / "results" / "ray.json"
UNIT_BYTES = 80_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--drivers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--megabytes", type=float, default=2)
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    moments = random.Random(given.seed)
    plan = [("node", moments.random(), moments.random(), moments.randrange(2)) for _ in range(given.nodes)]
    plan += [("driver", moments.random(), moments.random(), 0) for _ in range(given.drivers)]
    with tempfile.TemporaryDirectory(prefix="ray-trials-") as folder, three_nodes() as rig:
        trials = Trials(rig, Path(folder), given.tokenizer, given.megabytes)
        done = json.loads(RESULTS.read_text())["trials"] if given.resume and RESULTS.exists() else []
        for what, share, delay_seconds, which in plan[len(done) :]:
            done.append(trials.trial(what, share, delay_seconds, which))
            print(json.dumps(done[-1]), flush=True)
            _write(given, trials, done)
    raise SystemExit(not all(one["identical"] and one["finished_units_kept"] for one in done))


class Trials:
    """A corpus, and its store as one machine builds it."""

    def __init__(self, rig: RayRig, folder: Path, tokenizer: str, megabytes: float) -> None:
        self._rig, self._folder, self._tokenizer = rig, folder, tokenizer
        self._data = write_rows(folder / "data", megabytes)
        alone = self._driver(None, folder / "alone")
        alone.finish()
        self._wanted = contents(folder / "alone")
        self.units = len(finished_units(folder / "alone"))

    def trial(self, what: str, share: float, delay_seconds: float, which: int) -> dict[str, Any]:
        """Build the store, kill a node or the driver at a moment, and compare the result."""
        root = self._folder / "trial"
        shutil.rmtree(root, ignore_errors=True)
        start = time.monotonic()
        driver = self._driver(self._rig.address, root)
        units = int(share * self.units)
        if not driver.wait_until(lambda: marker(root) and len(finished_units(root)) >= units):
            driver.finish()  # raises if the build failed
        moment = time.monotonic() + delay_seconds
        driver.wait_until(lambda: time.monotonic() >= moment)
        before, complete = finished_units(root), bool(list(root.glob("*/index.json")))
        if what == "node":
            killed = self._rig.kill_node(which)
        else:
            driver.kill()
            killed = 1
            driver = self._driver(self._rig.address, root)
        driver.finish()
        after = finished_units(root)
        found = {
            "killed": what,
            "wanted_units": units,
            "delay_seconds": round(delay_seconds, 3),
            "units_at_the_kill": len(before),
            "complete_at_the_kill": complete,
            "processes_killed": killed,
            "identical": contents(root) == self._wanted,
            "finished_units_kept": all(after.get(name) == inode for name, inode in before.items()),
        }
        if what == "node":
            self._rig.replace_node()
        return found | {"seconds": round(time.monotonic() - start, 1)}

    def _driver(self, address: str | None, root: Path) -> Driver:
        return Driver(address, self._data, self._tokenizer, root, UNIT_BYTES)


def _write(given: argparse.Namespace, trials: Trials, done: list[dict[str, Any]]) -> None:
    good = [one for one in done if one["identical"] and one["finished_units_kept"]]
    result = {
        "command": "python -P tests/faults/ray_trials.py",
        "seed": given.seed,
        "nodes": 3,
        "units": trials.units,
        "node_kills": sum(one["killed"] == "node" for one in done),
        "driver_kills": sum(one["killed"] == "driver" for one in done),
        "byte_identical": len(good),
        "trials": done,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
