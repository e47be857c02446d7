"""Recovery times of a run on two slices: the slice is lost and restored, or the run continues without it and returns.

    python bench/slice_recovery.py             # writes results/slice_recovery.json; five minutes on two idle cores
    python bench/slice_recovery.py --trials 5

Each slice is one host: a process of `forerun train` with two virtual devices on this machine, and a tiny model
(tests/faults/slices_rig.py). The seconds are those from the kill of the slice (`restart`, `degrade`), or from the new
start of its host (`return`), to the next new step, so steps that are computed again count. The waiting time for
a lost slice is 0 here. A real slice adds the time until its machine exists, the size of the checkpoint,
and the compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "src")]

from slices_rig import EVERY, JOB, STEPS, Bench, trial, undisturbed  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "slice_recovery.json"
FIELDS = ("restart_seconds", "degrade_seconds", "return_seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "bench", steps=STEPS, every=EVERY, job=JOB)
        expected = undisturbed(bench)
        for number in range(args.trials):
            for fault in ("restore", "elastic"):
                lines.append(trial(bench, fault, number, expected))
                print(json.dumps(lines[-1]), flush=True)
    found: dict[str, object] = {field: [line[field] for line in lines if field in line] for field in FIELDS}
    found["losses_within_1e-5_and_restored_to_the_bit"] = all(line["ok"] for line in lines)
    found["largest_relative_difference_of_losses"] = max(line["loss_relative_difference"] for line in lines)
    found["machine"] = {"cores": os.cpu_count(), "load_average_before": round(load, 1)}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
