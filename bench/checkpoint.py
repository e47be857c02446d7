"""Cost of proven checkpoints: time of a blocking save and of a restore, compared with Orbax alone in one process.

    python bench/checkpoint.py                        # about 5 minutes on two cores; 10 GB of memory and of disk
    python bench/checkpoint.py --sizes 0.5 --rounds 5

The state has the structure of a training run: float32 weights in layers, twice as much for the optimizer, a step and a
key.

Each round measures three variants, in rotating order. `orbax` is Orbax with its defaults (it compresses). `orbax plain`
is Orbax with forerun's settings (no compression). `forerun` is the CheckpointStore: digests, the commit record and
verification. `blocking` is the time of the call to save; `whole` is the time until the checkpoint is committed. The
files are in the page cache for all three. A ratio compares two medians. CPU seconds are recorded as well, because they
depend less on other load.

Writes bench/results/checkpoint.json, and exits with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
TARGET = 1.1
WAYS = ("orbax", "orbax plain", "forerun")


def state_of(size_bytes: int) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    rows = max(1, size_bytes // (3 * 4 * 8 * 1024))
    random = np.random.default_rng(0)

    def arrays() -> Any:
        return {f"layer_{i}": jnp.asarray(random.standard_normal((rows, 1024), np.float32)) for i in range(8)}

    state = {
        "step": jnp.int32(7),
        "params": arrays(),
        "mu": arrays(),
        "nu": arrays(),
        "key": jax.random.key_data(jax.random.key(0)),
    }
    return jax.block_until_ready(state)


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    clock, processor = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - clock, time.process_time() - processor


def context(way: str) -> Any:
    from orbax.checkpoint import v1 as orbax

    chosen = orbax.Context()
    if way == "orbax plain":
        chosen.array.saving.use_replica_parallel = False
        chosen.array.saving.use_compression = False
    return chosen


def saved(way: str, folder: Path, state: Any) -> dict[str, float]:
    from orbax.checkpoint import v1 as orbax

    from forerun.checkpoint.store import CheckpointStore

    if way == "forerun":
        with CheckpointStore(folder / way, keep=1) as store:
            _, blocking, _ = timed(lambda: store.save(1, state, {"data": "digest", "loss": 1.0}))
            _, rest, _ = timed(store.wait)
        return {"blocking_seconds": blocking, "whole_seconds": blocking + rest}
    with context(way):
        response, blocking, _ = timed(lambda: orbax.save_async(folder / way, state))
        _, rest, _ = timed(response.result)
    return {"blocking_seconds": blocking, "whole_seconds": blocking + rest}


def restored(way: str, folder: Path, like: Any) -> dict[str, float]:
    import jax
    from orbax.checkpoint import v1 as orbax

    from forerun.checkpoint.reader import Reader

    def load() -> Any:
        if way == "forerun":
            found = Reader(folder / way).restore_newest(like)
            assert found is not None
            return jax.block_until_ready(found.state)
        with context(way):
            return jax.block_until_ready(orbax.load(folder / way, like))

    _, seconds, processor = timed(load)
    return {"restore_seconds": seconds, "restore_processor_seconds": processor}


def measured(size_bytes: int, rounds: int, at: Path) -> dict[str, Any]:
    import jax

    state = state_of(size_bytes)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for turn in range(rounds + 1):
        folder = Path(tempfile.mkdtemp(dir=at))
        order = [*WAYS[turn % 3 :], *WAYS[: turn % 3]]
        try:
            figures = {way: saved(way, folder, state) for way in order}
            os.sync()
            for way in order:
                figures[way] |= restored(way, folder, like)
        finally:
            shutil.rmtree(folder)
        for way in WAYS if turn else ():  # the first round warms up
            for name, value in figures[way].items():
                found[way].setdefault(name, []).append(value)
    medians = {way: {name: round(statistics.median(all_), 4) for name, all_ in found[way].items()} for way in WAYS}
    ratios = {
        f"{name.removesuffix('_seconds')} of {way}": round(medians["forerun"][name] / medians[way][name], 3)
        for way in WAYS[:2]
        for name in medians["forerun"]
    }
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return {"state_bytes": size, "rounds": rounds, "medians": medians, "ratios": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 1, 2], help="GB of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--at", type=Path, default=None, help="folder for the checkpoints")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "checkpoint.json")
    given = parser.parse_args()
    results = []
    for size in given.sizes:
        results.append(measured(int(size * 1e9), given.rounds, given.at or Path(tempfile.gettempdir())))
        print(json.dumps(results[-1]), flush=True)
    missed = [
        f"{name} at {result['state_bytes']} bytes: {result['ratios'][name]}"
        for result in results
        for name in ("blocking of orbax plain", "restore of orbax plain")
        if result["ratios"][name] > TARGET
    ]
    summary = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "target": TARGET,
        "missed": missed,
        "results": results,
    }
    given.out.write_text(json.dumps(summary, indent=1) + "\n")
    print("\n".join(missed) or "every target is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
