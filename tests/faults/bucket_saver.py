"""A small training loop that saves into a bucket, in a process of its own: `bucket_saver.py ADDRESS LAST EVERY`.

It goes on from the newest checkpoint.

Its state is a function of the step, so that whoever restores can prove it. One JSON line per event. The waits of gcsfs
and TensorStore are a twentieth of what they are elsewhere, and ours are short too, so that an outage of seconds
outlasts all tries of a library as one of half an hour would.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import gcsfs.retry
import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from orbax.checkpoint._src.serialization import tensorstore_utils

from forerun.checkpoint.reader import Reader
from forerun.checkpoint.storage import bucket
from forerun.checkpoint.storage.retries import RetrySchedule
from forerun.checkpoint.store import CheckpointStore
from forerun.errors import UserError

STEP_SECONDS = 0.02
COMPRESSED = 20
PATIENCE = RetrySchedule(first_seconds=0.1, most_seconds=1.0, total_seconds=600.0)


def compress() -> None:
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / COMPRESSED)

    gcsfs.retry.asyncio = SimpleNamespace(sleep=sleep)
    bucket._SILENT_SECONDS = 2
    whole = tensorstore_utils.get_ts_context

    def hasty(**settings: Any) -> Any:
        spec = whole(**settings).spec.to_json()
        retries = {"max_retries": 4, "initial_delay": "50ms", "max_delay": "200ms"}
        return tensorstore.Context({**spec, "gcs_request_retries": retries})

    tensorstore_utils.get_ts_context = hasty


def state_of(step: int) -> dict[str, Any]:
    numbers = np.random.default_rng(step)
    arrays = {f"w{i}": jnp.asarray(numbers.standard_normal((64, 256), np.float32)) for i in range(4)}
    return {**arrays, "step": jnp.int32(step)}


def like() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


def tell(**about: Any) -> None:
    print(json.dumps(about), flush=True)


def leftovers(address: str) -> list[str]:
    reader = Reader(address)
    named = {commit.folder for commit in reader.log.commits()}
    return [name for name in reader.place.names() if name not in {*named, "commits"}]


def run(address: str, last: int, every: int) -> None:
    longest = {"save": 0.0, "check": 0.0, "waited": 0.0}
    told: list[str] = []
    with CheckpointStore(address, keep=2, patience=PATIENCE, tell=told.append) as store:
        found = store.restore_newest(like())
        good = found is None or all(
            np.asarray(a).tobytes() == np.asarray(b).tobytes()
            for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(state_of(found.step)), strict=True)
        )
        skipped = [] if found is None else [str(skip) for skip in found.skipped]
        tell(kind="opened", restored=found and found.step, good=good, skipped=skipped, leftovers=leftovers(address))
        make = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0, tree), donate_argnums=0)
        first = found.step if found else 0
        make(state_of(first))
        saved = first
        for step in range(first + 1, last + 1):
            tell(kind="step", step=step)
            time.sleep(STEP_SECONDS)
            began = time.monotonic()
            store.check()
            longest["check"] = max(longest["check"], time.monotonic() - began)
            if store._saving is None and saved != first:
                tell(kind="committed", step=saved)
                saved = first
            if step % every == 0:
                state = make(state_of(step))
                waits = store._saving is not None and not store._saving.done.done()
                began = time.monotonic()
                store.save(step, state, {"step": step})
                saved = step
                kind = "waited" if waits else "save"
                longest[kind] = max(longest[kind], time.monotonic() - began)
                jax.tree.map(lambda x: x.delete(), state)  # as a step that donates it would
        store.wait()
        tell(kind="done", steps=store.steps(), told=told, **{key: round(value, 3) for key, value in longest.items()})


if __name__ == "__main__":
    compress()
    try:
        run(sys.argv[1], *map(int, sys.argv[2:4]))
    except UserError as error:
        tell(kind="failed", what=error.what, why=error.why, fix=error.fix)
        sys.exit(2)
