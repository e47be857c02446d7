"""Faults of what a run writes to and relies on: `python tests/faults/storage_rig.py KIND TRIALS`.

    bucket-flaky bucket-refuse bucket-close bucket-hang bucket-slow bucket-reset bucket-lost bucket-kill bucket-tour
    tracker-500 tracker-hang tracker-slow tracker-lost tracker-close tracker-dns, and each with -later
    clock-restarts clock-run            # needs libfaketime
    lock-dead lock-live lock-race
    disk-full disk-eio                  # need root, and strace

One JSON line per trial; `ok` says whether what must hold did. Seeds are the trial's number.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    kind, trials = sys.argv[1], int(sys.argv[2])
    room, _, name = kind.partition("-")
    module = __import__(f"{room}_trials")
    try:
        for seed in range(trials):
            print(json.dumps(module.trial(name, seed)), flush=True)
    finally:
        getattr(module, "end", lambda: None)()
