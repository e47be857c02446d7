"""Growth of the trainer's memory: a tiny model is trained for 2,000 steps by a real `forerun train`.

    python bench/memory.py                          # about two minutes on two idle cores
    python bench/memory.py --set data.ledger=true  # with overrides, as in `forerun train`

Reads the peak (VmHWM) and the resident memory (VmRSS) of the trainer's process every 50 steps. It reports two ratios:
the peak after 2,000 steps to the peak after 200, and the median resident memory in steps 1800 to 2000 to that in steps
200 to
400. The allocator returns memory in blocks of about 8 MiB, so the second ratio varies by a few percent in both
directions. Writes bench/results/memory.json, and exits with code 1 if the peak has grown by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent
STEPS, EVERY, WARM, WINDOW = 2000, 50, 200, 200
LIMIT = 1.01
JOB = """\
name: memory
model: {{layers: 2, embed: 32, heads: 2}}
data: {text}
sequence: 64
batch: 8
steps: {steps}
device: cpu
precision: {{compute: float32}}
remat: none
checkpoint: {{every: 1000000}}
log_every: 1
"""


def memory_of(pid: int) -> tuple[int, int] | None:
    """Return the peak and the resident bytes of a process, or None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", status, re.MULTILINE))
    return (int(found["VmHWM"]) * 1024, int(found["VmRSS"]) * 1024) if len(found) == 2 else None


def last_step(metrics: Path) -> int:
    """Return the step of the last complete line, or 0 if the file does not exist or is empty."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def sampled(folder: Path, settings: list[str]) -> dict[int, tuple[int, int]]:
    """Return peak and resident bytes by step, with one sample per EVERY steps."""
    job = folder / "job.yaml"
    job.write_text(JOB.format(text=ROOT.parent.absolute() / "examples/quickstart/text", steps=STEPS))
    command = [sys.executable, "-m", "forerun", "train", str(job), *settings]
    samples: dict[int, tuple[int, int]] = {}
    due = EVERY
    log = folder / "log.txt"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, cwd=folder, stdout=out, stderr=out) as trainer,
    ):
        while trainer.poll() is None:
            step = last_step(next(folder.rglob("metrics.jsonl"), folder / "none"))
            size = memory_of(trainer.pid)
            if size and step >= due:
                samples[step], due = size, (step // EVERY + 1) * EVERY
            time.sleep(0.02)
    if trainer.returncode:
        raise SystemExit(log.read_text()[-4000:])
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--write", type=Path, default=ROOT / "results/memory.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        samples = sampled(Path(name), arguments.set)
    peaks = [peak for peak, _ in samples.values()]
    grown = peaks[-1] / next(peak for step, (peak, _) in samples.items() if step >= WARM)
    early = statistics.median(size for step, (_, size) in samples.items() if WARM <= step <= WARM + WINDOW)
    late = statistics.median(size for step, (_, size) in samples.items() if step >= STEPS - WINDOW)
    result = {
        "steps": STEPS,
        "settings": arguments.set,
        "peak_bytes": peaks[-1],
        "peak_growth": grown,
        "resident_growth": late / early,
        "samples": {step: size for step, size in samples.items() if step >= WARM},
    }
    arguments.write.parent.mkdir(exist_ok=True)
    arguments.write.write_text(json.dumps(result) + "\n")
    for step, (peak, size) in samples.items():
        print(f"step {step:5}  peak {peak / 2**20:8.1f} MiB  resident {size / 2**20:8.1f} MiB")
    print(f"peak {grown - 1:+.2%} (limit {LIMIT - 1:.0%}), resident {late / early - 1:+.2%}")
    sys.exit(grown > LIMIT)


if __name__ == "__main__":
    main()
