"""A small training loop that saves into a bucket, in a process of its own: `bucket_saver.py ADDRESS LAST EVERY`.

It resumes from the newest checkpoint.

Its state is a function of the step, so that a restore can be verified. It prints one JSON line per event. The delays
between retries are short, so that an outage of seconds outlasts all tries of the driver.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from recording_reporter import RecordingReporter

from forerun.checkpoint import orbax_adapter
from forerun.checkpoint.reader import Reader
from forerun.checkpoint.store import CheckpointStore
from forerun.errors import UserError
from forerun.storage import bucket
from forerun.storage.retries import RetrySchedule

STEP_SECONDS = 0.02
PATIENCE = RetrySchedule(first_seconds=0.1, most_seconds=1.0, total_seconds=600.0)


def compress() -> None:
    bucket.SILENT_SECONDS = 2
    bucket.REQUEST_RETRIES = orbax_adapter.ARRAY_RETRIES = {
        "max_retries": 4,
        "initial_delay": "50ms",
        "max_delay": "200ms",
    }


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
    return [name for name in reader.storage.names() if name not in {*named, "commits"}]


def run(address: str, last: int, every: int) -> None:
    longest = {"save": 0.0, "check": 0.0, "waited": 0.0}
    told: list[str] = []
    with CheckpointStore(address, keep=2, patience=PATIENCE, reporter=RecordingReporter(told)) as store:
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
