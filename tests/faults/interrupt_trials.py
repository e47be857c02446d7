"""Ctrl-C at random moments of all commands: `python tests/faults/interrupt_trials.py TRIALS [FIRST]`, a line per trial.

Each trial is a real `forerun` process in its own session, as under a terminal: SIGINT goes to the whole process group.
The moment is uniform over the time that the command takes (a quarter of them in its first 0.3 s), and a fifth of the
trials press a second time. Training resumes one run over and over, so each trial also proves that the ones before left
it intact. A trial passes if

- the process ends with exit code 130, not by a signal, within `LIMIT_SECONDS` of wall time,
- nothing that was printed looks like a traceback,
- no process of its session and no temporary file is left,
- the step that the output names as saved is the newest checkpoint on the disk.

Before the first line of forerun's code Ctrl-C ends the process as it ends any Python program. Such trials are marked
`before_handler`; there, ending within the limit is enough.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rig import print_lines
from runs import ROOT, TEXT
from teacher_folder import write_teacher

from forerun.checkpoint.log import Log
from forerun.storage.folder import PART, LocalFolder

LIMIT_SECONDS = 2.0
GIVE_UP_SECONDS = 120.0
EARLY_SECONDS = 0.3
TRIES = 6
INTERRUPTED = 130
# What pip writes for the entry point.
SCRIPT = """\
#!{python}
import sys
from forerun.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""
SAVED = re.compile(r"the checkpoint of step (\d+) is saved")
JOB = """\
model: {layers: 2, embed: 64, heads: 4}
data: {path: text}
sequence: 64
batch: 4
steps: 100000
device: cpu
checkpoint: {every: 20, keep: 2}
sample: {tokens: 0}
"""
DISTIL = """\
model: {layers: 1, embed: 32, heads: 2}
data: {path: text}
sequence: 64
batch: 4
steps: 10
device: cpu
distil: {teacher: ./teacher, cache: soft, top_k: 8}
sample: {tokens: 0}
"""
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "job.yaml", "name=t"),
    "train cold": ("train", "job.yaml", "name=c", "data.store=store-{trial}"),
    "generate": ("generate", "runs/base", "Once upon a time", "--max-tokens", "400"),
    "generate batch": ("generate", "runs/base", "--batch", "prompts.jsonl", "--out", "answers-{trial}.jsonl"),
    "chat": ("chat", "chatty", "--max-tokens", "400"),
    "eval": ("eval", "runs/base", "--data", "text/carroll-alice.txt"),
    "export": ("export", "runs/base", "--to", "exported-{trial}"),
    "cache": ("cache", "distil.yaml", "distil.cache=soft-{trial}"),
    "plan": ("plan", "job.yaml", "--on", "v5e-1", "--no-cache"),
    "data": ("data", "job.yaml", "data.store=store-{trial}"),
    "check": ("check", "job.yaml"),
    "doctor": ("doctor",),
    "hardware": ("hardware",),
    "schema": ("schema",),
    "init": ("init", "new-{trial}.yaml", "--recipe", "pretrain", "--data", "text"),
}
COLD = ("train cold", "generate", "eval", "cache")  # with an empty compile cache
ENDLESS_SECONDS = 8.0  # how long training is let run after its first step to learn its usual time


class Bench:
    """A folder with jobs, a small trained run, and caches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text").mkdir(parents=True)
        shutil.copy(TEXT, folder / "text")
        (folder / "job.yaml").write_text(JOB)
        (folder / "distil.yaml").write_text(DISTIL)
        prompts = [json.dumps({"prompt": f"Number {number} was"}) for number in range(64)]
        (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": str(ROOT / "src"),
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache" / "compiled"),
            "TMPDIR": str(folder / "tmp"),
            "HF_HUB_OFFLINE": "1",
        }
        (folder / "tmp").mkdir()
        script = folder / "forerun"
        script.write_text(SCRIPT.format(python=sys.executable))
        script.chmod(0o755)

    def prepare(self) -> None:
        """Train the run that other commands read, and write the models that they need."""
        write_teacher(self.folder / "teacher")
        self.finish("train", "job.yaml", "name=base", "steps=20")
        self.finish("export", "runs/base", "--to", "chatty")
        template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        (self.folder / "chatty" / "chat_template.jinja").write_text(template)

    def start(self, words: tuple[str, ...], compiled: str | None = None) -> subprocess.Popen[bytes]:
        extra = {} if compiled is None else {"JAX_COMPILATION_CACHE_DIR": str(self.folder / compiled)}
        log = (self.folder / "output").open("wb")
        with log:
            return subprocess.Popen(
                [str(self.folder / "forerun"), *words],
                cwd=self.folder,
                env={**self.environment, **extra},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def finish(self, *words: str) -> None:
        process = self.start(words)
        assert process.wait(GIVE_UP_SECONDS * 5) == 0, self.output()

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def leftovers(self) -> list[str]:
        """Temporary files that should not outlive a process; a save that was cut off is removed by the next owner."""
        found = [*self.folder.glob(f"*{PART}"), *self.folder.glob("runs/.*.lock"), *(self.folder / "tmp").iterdir()]
        found += self.folder.glob(f".*{PART}")
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def newest(self, name: str) -> int | None:
        commits = Log(LocalFolder(self.folder / "runs" / name / "checkpoints")).commits()
        return commits[-1].step if commits else None


def usual_seconds(bench: Bench, name: str) -> float:
    """How long the command takes undisturbed; for training, until some seconds of steps."""
    began = time.monotonic()
    process = bench.start(words_of(name, "usual"), "cold-usual" if name in COLD else None)
    speak(name, process)
    if not name.startswith("train"):
        process.wait(GIVE_UP_SECONDS * 5)
        return time.monotonic() - began
    while "\nstep " not in bench.output() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(ENDLESS_SECONDS)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(GIVE_UP_SECONDS)
    return time.monotonic() - began


def words_of(name: str, trial: object) -> tuple[str, ...]:
    return tuple(word.replace("{trial}", str(trial)) for word in COMMANDS[name])


def speak(name: str, process: subprocess.Popen[bytes]) -> None:
    """Ask a chat two questions; the second answer is never the last."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(b"Hello\nWho are you\n" if name == "chat" else b"")
        process.stdin.flush()
        if name == "chat":
            process.stdin.close()


def trial(bench: Bench, number: int, seconds: dict[str, float]) -> dict[str, Any]:
    chance = random.Random(f"interrupt {number}")
    name = list(COMMANDS)[number % len(COMMANDS)]
    moment = chance.uniform(0, EARLY_SECONDS if chance.random() < 0.25 else seconds[name])
    again = chance.uniform(0.05, 0.5) if chance.random() < 0.2 else None
    cold = f"cold-{number}" if name in COLD and chance.random() < 0.7 else None
    for _ in range(TRIES):
        began = time.monotonic()
        process = bench.start(words_of(name, number), cold)
        speak(name, process)
        time.sleep(max(0.0, began + moment - time.monotonic()))
        ready, over = threads(process.pid) > 1, process.poll() is not None
        if not over:
            break
        moment *= chance.uniform(0.3, 0.9)  # the machine is less busy than when the usual time was taken
    cpu, load = cpu_seconds(process.pid), os.getloadavg()[0]
    press(process)
    pressed = time.monotonic()
    if again is not None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(again)
        press(process)
    line = ended(bench, process, name, pressed, cpu)
    for path in bench.folder.glob(f"*-{number}*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    # A process that was about to end with its result may do so; training never is.
    codes = (INTERRUPTED,) if name.startswith("train") else (INTERRUPTED, 0)
    code_right = line["code"] in codes or over or not ready
    return {
        "fault": "interrupt",
        "trial": number,
        "command": name,
        "moment": round(moment, 3),
        "second_after": None if again is None else round(again, 3),
        "before_handler": not ready and not over,
        "over_before": over,
        "load": round(load, 1),
        **line,
        "ok": bool(
            code_right
            and line["stop_seconds"] <= LIMIT_SECONDS
            and (not line["traceback"] or not ready)
            and not line["leftovers"]
            and not line["processes"]
            and line["told_right"]
        ),
    }


def ended(bench: Bench, process: subprocess.Popen[bytes], name: str, pressed: float, cpu: float) -> dict[str, Any]:
    """Wait for the end, and describe it."""
    spent, told, late = cpu, None, list[str]()
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        spent = max(spent, cpu_seconds(process.pid))
        if told is None and "stopped by Ctrl-C" in bench.output():
            told = time.monotonic() - pressed
        if not late and time.monotonic() - pressed > LIMIT_SECONDS:
            late = waits(process.pid)
        time.sleep(0.005)
    seconds = time.monotonic() - pressed
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = bench.output()
    left = survivors(process.pid)
    run = next((word.removeprefix("name=") for word in COMMANDS[name] if word.startswith("name=")), None)
    saved = SAVED.search(output)
    newest = bench.newest(run) if run else None
    shown = [line for line in output.splitlines() if line.strip()]
    return {
        "code": process.returncode,
        "stop_seconds": round(seconds, 3),
        "stop_cpu_seconds": round(spent - cpu, 3),
        "told_seconds": None if told is None else round(told, 3),
        **({"late": late} if late else {}),
        "traceback": "Traceback" in output or "Exception ignored" in output,
        "leftovers": bench.leftovers(),
        "processes": left,
        "told_right": saved is None or int(saved[1]) == newest,
        "saved": None if saved is None else int(saved[1]),
        "last": shown[-1][-160:] if shown else "",
        "before": shown[-2][-100:] if len(shown) > 1 else "",
    }


def press(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)


def threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def waits(pid: int) -> list[str]:
    """What each thread of a process does that should be gone: its state, and where in the kernel it waits."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(f"{state} {(task / 'wchan').read_text()}")
    return sorted(found)


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def survivors(session: int, seconds: float = 3.0) -> list[str]:
    """Processes of the session that are alive after some time for them to notice the end."""
    deadline = time.monotonic() + seconds
    while (found := _in_session(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(int(pid.split()[0]), signal.SIGKILL)
    return found


def _in_session(session: int) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{pid} {command[:100]}")
    return found


def trials(count: int, first: int = 0) -> Iterator[dict[str, Any]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ours
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder, "bench"))
        bench.prepare()
        seconds = {name: usual_seconds(bench, name) for name in COMMANDS}
        print(f"usual seconds: {seconds}", file=sys.stderr, flush=True)
        for number in range(first, first + count):
            yield trial(bench, number, seconds)


if __name__ == "__main__":
    sys.exit(print_lines(trials(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
