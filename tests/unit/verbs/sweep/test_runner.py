"""The processes of a sweep, with a small program in place of `forerun train`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from error_assertions import assert_error
from recording_reporter import RecordingReporter

from forerun.errors import UserError
from forerun.verbs.sweep import runner as runner_module
from forerun.verbs.sweep.run_sweep import PreparedSweep, prepare, require_success
from forerun.verbs.sweep.runner import DeviceShare, SweepRunner, last_error
from forerun.verbs.sweep.sweep_file import SweepFile, SweepResults

JOB = "model: {layers: 1, embed: 16, heads: 2}\ndata: text\nsteps: 4\nbatch: 2\nsequence: 8\n"
# A run of seed N ends with the exit code in the file `codes`, or waits for a signal if the code is "wait".
CHILD = """
import json, os, pathlib, signal, sys
values = dict(word.split("=", 1) for word in sys.argv[2:])
folder = pathlib.Path(values["runs"]) / values["name"]
here = pathlib.Path(__file__).parent
with open(here / "started", "a") as out:
    out.write(values["seed"] + "\\n")
code = json.loads((here / "codes").read_text()).get(values["seed"], 0)
if code == "wait":
    for number, end in ((signal.SIGINT, 130), (signal.SIGTERM, 75)):
        signal.signal(number, lambda number, frame, end=end: os._exit(end))
    with open(here / "ready", "w") as ready:
        ready.write("x")
    while True:
        signal.pause()
folder.mkdir(parents=True, exist_ok=True)
seen = {"cores": sorted(os.sched_getaffinity(0)), "share": os.environ.get("SHARE")}
(folder / "seen.json").write_text(json.dumps(seen))
if code:
    print("error: it diverged  [E-RUN-999]\\n  why: seed " + values["seed"])
    sys.exit(code)
seed = int(values["seed"])
rows = [{"step": 1, "loss": 3.0}, {"step": 4, "loss": 2.0 + 0.1 * seed, "validation_loss": 2.5 - 0.1 * seed}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
summary = {"steps": 4, "final_loss": 2.0 + 0.1 * seed, "program": "abc", "compile_cached": seed > 0}
(folder / "summary.json").write_text(json.dumps(summary))
"""


class Stage:
    """A job, a program in place of `train`, and the exit codes of its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tiny.yaml").write_text(JOB)
        (folder / "child.py").write_text(CHILD)
        self.codes()
        self.said: list[str] = []

    def codes(self, **codes: int | str) -> None:
        content = {name.removeprefix("seed"): code for name, code in codes.items()}
        (self.folder / "codes").write_text(json.dumps(content))

    def prepare(self, *words: str) -> PreparedSweep:
        return prepare(self.folder / "tiny.yaml", [*(words or ("seed=0,1,2",)), f"runs={self.folder / 'runs'}"])

    def runner(self, sweep: PreparedSweep, shares: list[DeviceShare] | None = None, **options: Any) -> SweepRunner:
        return SweepRunner(sweep.path, sweep.file, shares or [DeviceShare()], RecordingReporter(self.said), **options)

    def run(self, sweep: PreparedSweep, **options: Any) -> SweepResults:
        self.runner(sweep, **options).run(sweep.unfinished, len(sweep.runs))
        return sweep.results()

    def started(self) -> list[str]:
        return (self.folder / "started").read_text().split()

    def ready(self) -> Callable[[], None]:
        """Return a function that waits until a run waits for its signal."""
        os.mkfifo(self.folder / "ready")

        def wait() -> None:
            # Read to the end: a run that writes after this end is closed would get a broken pipe.
            assert (self.folder / "ready").read_text() == "x"

        return wait


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(runner_module, "TRAIN_COMMAND", (sys.executable, "-P", str(tmp_path / "child.py")))
    return Stage(tmp_path)


def states(results: SweepResults) -> dict[int, str]:
    return {run.values["seed"]: run.state for run in results.runs}


def test_runs_are_trained_in_order_and_sorted_by_validation_loss(stage: Stage) -> None:
    results = stage.run(stage.prepare())
    assert stage.started() == ["0", "1", "2"]
    assert results.metric == "validation loss"
    assert [run.values["seed"] for run in results.runs] == [2, 1, 0]
    assert results.best is not None
    assert (results.best.validation_loss, results.best.loss) == (pytest.approx(2.3), pytest.approx(2.2))
    assert (results.best.tokens, results.programs) == (4 * 2 * 8, {"abc"})
    assert stage.said[0] == "run 1/3: seed=0"


def test_finished_runs_are_skipped_and_failed_ones_tried_again(stage: Stage) -> None:
    stage.codes(seed1=2)
    results = stage.run(stage.prepare())
    assert states(results) == {0: "finished", 1: "failed", 2: "finished"}
    with pytest.raises(UserError) as caught:
        require_success(results, stage.folder)
    assert_error(caught.value, "E-RUN-082", what="1 of 3", why="it diverged  [E-RUN-999]")
    assert prepared_seconds(stage) is not None
    stage.codes()
    results = stage.run(stage.prepare())
    assert stage.started() == ["0", "1", "2", "1"]
    assert set(states(results).values()) == {"finished"}
    require_success(results, stage.folder)


def prepared_seconds(stage: Stage) -> float | None:
    """The estimate of the remaining time, after two runs have finished."""
    return stage.prepare().estimated_seconds()


def test_stop_on_failure_starts_no_other_run(stage: Stage) -> None:
    stage.codes(seed0=2)
    results = stage.run(stage.prepare(), stop_on_failure=True)
    assert states(results) == {0: "failed", 1: "waiting", 2: "waiting"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stop_ends_all_processes_and_the_next_start_resumes_them(
    stage: Stage, number: signal.Signals, code: int
) -> None:
    stage.codes(seed1="wait")
    sweep, wait = stage.prepare(), stage.ready()
    runner = stage.runner(sweep)
    thread = threading.Thread(target=lambda: (wait(), runner.stop(number)))
    thread.start()
    runner.run(sweep.unfinished, 3)
    thread.join()
    assert states(sweep.results()) == {0: "finished", 1: "stopped", 2: "waiting"}
    assert sweep.file.record(sweep.runs[1]).exit_code == code
    stage.codes()
    assert set(states(stage.run(stage.prepare())).values()) == {"finished"}
    assert stage.started() == ["0", "1", "1", "2"]


DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored if the tests run in the background
import forerun.verbs.sweep.runner as runner
from forerun.__main__ import main
runner.TRAIN_COMMAND = (sys.executable, "-P", sys.argv.pop(1))
main()
"""


@pytest.mark.timing
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_the_command_ends_its_runs(stage: Stage, number: signal.Signals, code: int) -> None:
    """As with Ctrl-C in a terminal, which reaches only the command: its runs have their own sessions."""
    stage.codes(seed0="wait")
    wait = stage.ready()
    words = ["sweep", str(stage.folder / "tiny.yaml"), "seed=0,1", f"runs={stage.folder / 'runs'}"]
    command = [sys.executable, "-P", "-c", DRIVER, str(stage.folder / "child.py"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait()
        [child] = children_of(process.pid)
        handle = os.pidfd_open(child)
        process.send_signal(number)
        assert process.wait() == code
    assert select.select([handle], [], [], 60)[0], "the run ends too"
    os.close(handle)
    assert states(stage.prepare("seed=0,1").results())[1] == "waiting"
    assert stage.started() == ["0"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_exception_ends_the_processes(stage: Stage) -> None:
    """In a notebook, Ctrl-C is a KeyboardInterrupt in the thread that waits."""
    stage.codes(seed0="wait")
    sweep, wait = stage.prepare(), stage.ready()
    runner = stage.runner(sweep)

    def interrupted(timeout: float) -> None:
        wait()
        raise KeyboardInterrupt

    runner._ended.get = interrupted  # type: ignore[assignment,method-assign]
    children = runner._children
    seen: list[int] = []
    start = runner._start
    runner._start = lambda run, share: (start(run, share), seen.append(children[run.name].pid))  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        runner.run(sweep.unfinished, 3)
    assert not children
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_each_process_gets_the_environment_and_the_cores_of_its_share(stage: Stage) -> None:
    before = sorted(os.sched_getaffinity(0))
    core = before[0]
    shares = [DeviceShare({"SHARE": "a"}, (core,), "a"), DeviceShare({"SHARE": "b"}, None, "b")]
    sweep = stage.prepare("seed=0,1")
    stage.run(sweep, shares=shares)
    seen = [json.loads((sweep.folder / run.name / "seen.json").read_text()) for run in sweep.runs]
    assert [(one["share"], one["cores"]) for one in seen] == [("a", [core]), ("b", before)]
    assert sorted(os.sched_getaffinity(0)) == before
    assert "SHARE" not in os.environ


def test_a_changed_sweep_is_reported(stage: Stage) -> None:
    stage.run(stage.prepare("seed=0,1"))
    assert stage.prepare("seed=0,1").changes == ()
    changed = stage.prepare("seed=0,2", "log_every=5")
    assert [run.values["seed"] for run in changed.unfinished] == [0, 2], "seed 0 ran with another job"
    assert any("seed=0,1 -> 0,2" in line for line in changed.changes)
    assert any("log_every" in line for line in changed.changes)
    assert any(line.startswith("1 earlier run") for line in changed.changes)
    with pytest.raises(UserError) as caught:
        stage.prepare("seed=0,1", "model.layers=2")
    assert_error(caught.value, "E-RUN-080", why="model.layers: 1 -> 2")


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 99}', '{"version": 1, "axes": {}, "job": {}, "runs": 3}'])
def test_a_damaged_file_is_an_error_that_names_it(stage: Stage, content: str) -> None:
    sweep = stage.prepare()
    sweep.folder.mkdir(parents=True)
    sweep.file.path.write_text(content)
    with pytest.raises(UserError) as caught:
        stage.prepare()
    assert_error(caught.value, "E-RUN-081", what=str(sweep.file.path))


def test_a_killed_sweep_resumes_the_run_that_was_running(stage: Stage) -> None:
    sweep = stage.prepare()
    sweep.file.update(sweep.runs[0], state="running")
    assert SweepFile(sweep.folder, sweep.base, sweep.grid, sweep.runs).record(sweep.runs[0]).state == "running"
    assert len(stage.prepare().unfinished) == 3


@pytest.mark.parametrize(
    ("words", "programs"),
    [
        (("optimizer.lr=1e-5,3e-5", "seed=0,1", "steps=4,8"), 1),
        (("optimizer.weight_decay=0,0.1", "log_every=1,2"), 1),
        (("model.layers=1,2", "optimizer.lr=1e-5,3e-5"), 2),
        (("batch=2,4", "sequence=8,16"), 4),
    ],
)
def test_runs_that_differ_in_numbers_only_share_a_program(stage: Stage, words: tuple[str, ...], programs: int) -> None:
    assert stage.prepare(*words).compilations() == programs


def test_the_error_of_a_log_is_its_last_error_line(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    assert last_error(log) == ""
    log.write_text("error: old  [E-X-1]\nstep 1\nerror: new  [E-X-2]\n  why: y\n")
    assert last_error(log) == "error: new  [E-X-2]"
    log.write_text("Killed\n")
    assert last_error(log) == "Killed"
