"""Training from token stores in buckets: `python tests/faults/data_rig.py KIND TRIALS`.

    clean     nothing happens: GCS and S3, on one and on four hosts, with and without a cache
    faults    the same while one read in fifty fails, is slow, is cut short or has a flipped bit
    deleted   the same with faults, and the cache is deleted in the middle of the run
    damaged   one byte of an object of the bucket is changed: the run is rejected, and the error names the object

One JSON line per trial. `ok`: losses, state and ledger are those of a run with a local store on the same number of
hosts, and the run reports every fault that the proxy injected.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["JAX_PLATFORMS"] = "cpu"

from data_buckets import HOSTS, Case, DataBuckets, damage_of, unreported

PLACES = [*itertools.product(("gcs", "s3"), (1, HOSTS))]
CASES = {
    "clean": [Case(place, hosts, cache) for (place, hosts), cache in itertools.product(PLACES, (False, True))],
    "faults": [
        Case(place, hosts, cache, faults=True) for (place, hosts), cache in itertools.product(PLACES, (False, True))
    ],
    "deleted": [Case(place, hosts, cache=True, faults=True, deleted=True) for place, hosts in PLACES],
    "damaged": [Case("gcs"), Case("s3")],
}


def trial(buckets: DataBuckets, case: Case) -> dict[str, Any]:
    """Return what became of one case."""
    expected = buckets.reference(case.hosts)
    began = time.perf_counter()
    found = buckets.trained(case)
    differs, missing = expected.differs_in(found.outcome), unreported(case, found)
    return {
        "ok": not differs and not missing,
        "differs": differs,
        "unreported": missing,
        "reads": found.reads,
        "injected": found.injected_by_kind(),
        "counts": found.counts,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(kind: str, trials: int) -> None:
    with tempfile.TemporaryDirectory() as folder, DataBuckets(Path(folder) / "bench") as buckets:
        for number, case in enumerate(CASES[kind][:trials]):
            about = {"fault": f"data {kind}", "trial": number, "case": case.name, "hosts": case.hosts}
            told = damage_of(buckets, case) if kind == "damaged" else trial(buckets, case)
            print(json.dumps({**about, **told}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
