"""Time from a clone to a run report in a browser, following the commands of docs/tutorials/quickstart.md.

    python bench/quickstart_time.py                 # writes results/quickstart_time.json; exit code 1 above the limit
    python bench/quickstart_time.py --keep /tmp/q   # keeps the clone, the log and the screenshot

The commands run one after the other in one shell, in a new clone and a new virtual environment, with empty caches, on
two cores. Packages come from the configured index. At the end, a headless Chromium opens the report and takes a
screenshot. The machine must be idle, because every other process counts. The clone has the newest commit: changes that
are not committed are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorials" / "quickstart.md"
RESULT = ROOT / "bench" / "results" / "quickstart_time.json"
LIMIT_SECONDS = 480.0
CORES = 2
ADDRESS = "ADDRESS"  # the page's placeholder for the address of the repository
MIN_SCREENSHOT_BYTES = 20_000  # an empty page of this size has fewer


@dataclass(frozen=True)
class Command:
    """A command of the page and its wall time."""

    command: str
    seconds: float


def page_commands(text: str) -> list[str]:
    """Return the lines of the bash blocks of a page."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def script(commands: list[str]) -> str:
    """Return a shell script that reports the end of each command on file descriptor 3."""
    parts = ["set -eu"]
    for number, command in enumerate(commands):
        parts += [f"printf '\\n$ %s\\n' {_quoted(command)}", command, f"echo {number} >&3"]
    return "\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def new_environment(work: Path) -> dict[str, str]:
    """Return variables with empty caches, without an active environment, and with this Python as `python3`."""
    tools = work / "tools"
    tools.mkdir()
    (tools / "python3").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    kept = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    }
    active = str(Path(sys.prefix) / "bin")
    path = [str(tools), *(part for part in kept["PATH"].split(os.pathsep) if part != active)]
    return kept | {
        "PATH": os.pathsep.join(path),
        "XDG_CACHE_HOME": str(work / "cache"),
        "PIP_CACHE_DIR": str(work / "pip"),
    }


def run_commands(commands: list[str], work: Path, environment: Mapping[str, str]) -> list[Command]:
    """Run the commands in one shell, print each with its time, and return the times."""
    read_end, write_end = os.pipe()
    done: list[Command] = []
    log = work / "log.txt"
    with log.open("wb") as output:
        began = time.monotonic()
        shell = subprocess.Popen(
            ["bash", "-c", f"exec 3>&{write_end}\n{script(commands)}"],
            cwd=work,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[write_end],
        )
        os.close(write_end)
        with os.fdopen(read_end) as reports:
            for number in reports:
                now = time.monotonic()
                done.append(Command(commands[int(number)], round(now - began, 2)))
                print(f"{done[-1].seconds:8.1f} s  {done[-1].command}", flush=True)
                began = now
        code = shell.wait()
    if code or len(done) < len(commands):
        tail = log.read_text("utf-8", "replace").splitlines()[-30:]
        print("\n".join(tail), file=sys.stderr)
        sys.exit(f"'{commands[len(done)]}' failed with exit code {code}")
    return done


def open_report(report: Path, loss: float, work: Path, browser: str) -> Command:
    """Open a report in a headless browser, check that it shows the loss, and return the time."""
    began = time.monotonic()
    picture = work / "report.png"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={work / 'browser'}"]
    address = report.as_uri()
    subprocess.run(
        [browser, *options, f"--screenshot={picture}", "--window-size=1280,1600", address],
        check=True,
        capture_output=True,
    )
    seconds = time.monotonic() - began  # the check below is not a part of the way to the report
    page = subprocess.run([browser, *options, "--dump-dom", address], check=True, capture_output=True, text=True).stdout
    shown = [text for text in (f"{loss:.4f}", f"{loss:.3f}", f"{loss:.2f}") if text in re.sub(r"<[^>]+>", " ", page)]
    if picture.stat().st_size < MIN_SCREENSHOT_BYTES or not shown:
        sys.exit(f"the report does not show the loss {loss:.4f}: {picture}, {picture.stat().st_size} bytes")
    return Command(f"open {report.name} in a browser", round(seconds, 2))


def measured(work: Path, browser: str) -> dict[str, object]:
    """Follow the page in a folder, and return the times."""
    commands = [line.replace(ADDRESS, str(ROOT)) for line in page_commands(PAGE.read_text("utf-8"))]
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:CORES]))
    load = os.getloadavg()[0]
    print(f"{len(commands)} commands of {PAGE.relative_to(ROOT)}, load {load:.2f}", flush=True)
    done = run_commands(commands, work, new_environment(work))
    clone = work / "forerun"
    summary = json.loads((clone / "runs" / "quickstart" / "summary.json").read_text())
    done.append(open_report(clone / "report.html", summary["final_loss"], work, browser))
    print(f"{done[-1].seconds:8.1f} s  {done[-1].command}")
    total = round(sum(command.seconds for command in done), 1)
    return {
        "total_seconds": total,
        "limit_seconds": LIMIT_SECONDS,
        "cores": CORES,
        "load_before": round(load, 2),
        "python": sys.version.split()[0],
        "final_loss": summary["final_loss"],
        "commands": [asdict(command) | {"command": command.command.replace(str(ROOT), ADDRESS)} for command in done],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for the clone, the log and the screenshot; it must not exist")
    parser.add_argument("--no-result", action="store_true", help="do not write the result file")
    args = parser.parse_args()
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
    )
    if not browser:
        sys.exit("no chromium or google-chrome on PATH")
    work = args.keep or Path(tempfile.mkdtemp(prefix="quickstart-"))
    work.mkdir(exist_ok=args.keep is None)
    try:
        result = measured(work.resolve(), browser)
    finally:
        if args.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    if not args.no_result:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['total_seconds']:8} s  total, limit {LIMIT_SECONDS:.0f} s")
    sys.exit(int(float(str(result["total_seconds"])) > LIMIT_SECONDS))


if __name__ == "__main__":
    main()
