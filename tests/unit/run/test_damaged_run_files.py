"""Damage to the files of a run before it is resumed, by the real command on a copy of one interrupted run.

The run skips the batches of steps 3 and 5, which are not numbers. It saves every second step and is interrupted in step
6, so it resumes from step 4: step 3 is in the checkpoint's skip list, step 5 only in skips.jsonl.
"""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from recording_reporter import RecordingReporter

from forerun.checkpoint.reader import Reader
from forerun.checkpoint.store import CheckpointStore
from forerun.cli.main import main
from forerun.config.load import dump, load
from forerun.config.schema import Job
from forerun.data.order.batches import Batches
from forerun.data.order.ledger import entries
from forerun.errors import UserError
from forerun.hardware.devices import choose
from forerun.objectives.batch import Batch
from forerun.reporter import LineReporter, StepView
from forerun.resolve.resolve_model import resolve_model
from forerun.run import train as loop
from forerun.run_folder.run_folder import RunFolder, job_of_run
from forerun.track.metrics import read_metrics
from forerun.trained_model.load_model import load_model

STEPS, SAVED, INTERRUPTED = 8, 4, 6
BAD = (3, 5)
Damage = Callable[[Path], None]


class Copying(LineReporter):
    """Copies a run's folder in the middle of the run, after a save: what a killed machine would leave."""

    def __init__(self, folder: Path, copy: Path) -> None:
        super().__init__(io.StringIO(), clock=time.monotonic)
        self._folder, self._copy = folder, copy

    def step(self, view: StepView) -> None:
        while view.step == INTERRUPTED and not self._copied():
            time.sleep(0.01)

    def _copied(self) -> bool:
        """Return whether the copy has the checkpoint. The saving thread may still remove temporary files."""
        shutil.rmtree(self._copy, ignore_errors=True)
        if Reader(self._folder / "checkpoints").newest() != SAVED:
            return False
        with suppress(shutil.Error, FileNotFoundError):
            shutil.copytree(self._folder, self._copy)
            return True
        return False


class BadBatches:
    """The batches of a run, with weights that are not numbers in some steps."""

    def __init__(self, batches: Batches, steps: tuple[int, ...]) -> None:
        self._batches, self._steps = batches, steps
        self.examples_at = batches.examples_at

    def batch_at(self, index: int) -> Batch[Any]:
        batch = self._batches.batch_at(index)
        return replace(batch, weights=np.full_like(batch.weights, np.nan)) if index + 1 in self._steps else batch


def use_bad_batches(patch: pytest.MonkeyPatch, steps: tuple[int, ...] = BAD) -> None:
    real = loop.batches_of
    patch.setattr(loop, "batches_of", lambda *given: BadBatches(real(*given), steps))


@dataclass(frozen=True)
class Result:
    losses: dict[int, float]
    examples: dict[int, list[Any]]
    state: list[bytes]


def result(job: Job) -> Result:
    folder = Path(job.runs) / job.name
    program = loop.program_on(resolve_model(job), choose("cpu", 1), None)
    state = Reader(folder / "checkpoints").restore(STEPS, program.saved(program.state))
    return Result(
        {row["step"]: row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row},
        dict(entries(folder / "ledger.jsonl")),
        [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)],
    )


@dataclass(frozen=True)
class Runs:
    file: Path
    interrupted: Path
    undisturbed: Result


@pytest.fixture(scope="module")
def runs(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    file = folder / "job.yaml"
    job = load(job_file, [f"runs={folder / 'whole'}", f"steps={STEPS}", "data.ledger=true", "name=run"]).job
    file.write_text(dump(job))
    with pytest.MonkeyPatch.context() as patch:
        use_bad_batches(patch)
        interrupted = folder / "run"
        assert loop.train(job, Copying(folder / "whole" / "run", interrupted)) is not None
    with closing(CheckpointStore(interrupted / "checkpoints", keep=2)) as store:
        assert store.newest() == SAVED
    assert [json.loads(line)["step"] for line in (interrupted / "skips.jsonl").read_bytes().splitlines()] == list(BAD)
    return Runs(file, interrupted, result(job))


@dataclass
class Resumable:
    """A copy of the interrupted run, and the real command that resumes it."""

    folder: Path
    file: Path
    capture: pytest.CaptureFixture[str]

    def resume(self, *overrides: str) -> tuple[int, list[str]]:
        """Return the exit code and the warnings."""
        self.capture.readouterr()
        code = main(["train", str(self.file), "name=run", f"runs={self.folder.parent}", *overrides])
        out, self.error = self.capture.readouterr()
        return code, [line.removeprefix("warning: ") for line in out.splitlines() if line.startswith("warning: ")]

    def result(self) -> Result:
        return result(load(self.file, ["name=run", f"runs={self.folder.parent}"]).job)


@pytest.fixture
def run(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Resumable:
    shutil.copytree(runs.interrupted, tmp_path / "run")
    return Resumable(tmp_path / "run", runs.file, capsys)


def change_digit(file: Path) -> None:
    """In the second line: another number, still JSON."""
    first, second, *rest = file.read_bytes().split(b"\n")
    place = next(at for at in reversed(range(len(second))) if second[at : at + 1].isdigit())
    digit = b"1" if second[place : place + 1] != b"1" else b"2"
    file.write_bytes(b"\n".join([first, second[:place] + digit + second[place + 1 :], *rest]))


def insert(line: bytes) -> Damage:
    """A line after the second one."""

    def damage(file: Path) -> None:
        lines = file.read_bytes().split(b"\n")
        file.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))

    return damage


def empty(file: Path) -> None:
    file.write_bytes(b"")


def fill_with_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def change_learning_rate(file: Path) -> None:
    text = file.read_text()
    assert "lr: 0.01" in text
    file.write_text(text.replace("lr: 0.01", "lr: 0.02"))


# What is done to both journals, to job.yaml, and which lines of the journals are kept aside as broken.
CASES: dict[str, tuple[Damage, Damage, bytes | None]] = {
    "digit": (change_digit, empty, None),
    "garbage": (insert(b"garbage"), fill_with_zeros, b"garbage\n"),
    "zero bytes": (insert(bytes(40)), Path.unlink, bytes(40) + b"\n"),
    "not UTF-8": (insert(b'{"step": 2, "why": "\xff\xfe"}'), change_learning_rate, b'{"step": 2, "why": "\xff\xfe"}\n'),
    "deleted": (Path.unlink, insert(b"\xff: ["), None),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_journals_and_job_are_reported_and_change_nothing(
    run: Resumable, runs: Runs, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    use_bad_batches(monkeypatch)
    journal_damage, job_damage, aside = CASES[case]
    metrics, ledger, job = (run.folder / name for name in ("metrics.jsonl", "ledger.jsonl", "job.yaml"))
    for journal in (metrics, ledger):
        journal_damage(journal)
    job_damage(job)
    code, warnings = run.resume()
    assert code == 0
    for file in (metrics, ledger, job):
        assert sum(str(file) in warning for warning in warnings) == 1, warnings
    found = run.result()
    assert found.state == runs.undisturbed.state
    after = {step: loss for step, loss in runs.undisturbed.losses.items() if step > SAVED}
    assert {step: loss for step, loss in found.losses.items() if step > SAVED} == after
    if case not in ("digit", "deleted"):
        assert (found.losses, found.examples) == (runs.undisturbed.losses, runs.undisturbed.examples)
    for journal in (metrics, ledger):
        broken = journal.with_name(f"{journal.name}.damaged")
        assert (broken.read_bytes() if broken.exists() else None) == aside
    assert load(job).job == load(runs.interrupted / "job.yaml", [f"runs={run.folder.parent}"]).job
    if case == "deleted":  # the finished run, again without its metrics
        metrics.unlink()
        assert run.resume()[0] == 0
    if case == "garbage":
        code, warnings = run.resume()
        assert (code, [warning for warning in warnings if str(run.folder) in warning]) == (0, []), "reported once"


def test_a_killed_run_is_not_damaged(run: Resumable, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files have lines after the checkpoint's step, and half a line at the end.

    The data is good now, and the skipped steps stay skipped.
    """
    use_bad_batches(monkeypatch, ())
    for name in ("metrics.jsonl", "ledger.jsonl", "skips.jsonl"):
        with (run.folder / name).open("ab") as out:
            out.write(b'{"step": 6, "lo')
    code, warnings = run.resume()
    assert code == 0
    assert [warning for warning in warnings if str(run.folder) in warning] == []
    assert run.result() == runs.undisturbed


def forge_skip(file: Path) -> None:
    """A step to come without a proof, one with another run's proof, and one with no meaning."""
    lines = [{"step": 7, "why": "loss nan"}, {"step": 8, "why": "loss nan", "proof": "0" * 32}, {"step": 9}]
    with file.open("a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def forge_early_skip(file: Path) -> None:
    text = file.read_text()
    assert '"step": 3' in text
    file.write_text(text.replace('"step": 3', '"step": 1'))


@pytest.mark.parametrize("damage", [forge_skip, forge_early_skip, Path.unlink])
def test_a_damaged_skip_list_is_restored(
    run: Resumable, runs: Runs, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    use_bad_batches(monkeypatch)
    skips = run.folder / "skips.jsonl"
    before = skips.read_bytes()
    damage(skips)
    code, warnings = run.resume()
    assert code == 0
    assert sum(str(skips) in warning for warning in warnings) == 1, warnings
    assert run.result() == runs.undisturbed
    assert skips.read_bytes() == before


@pytest.mark.parametrize("override", ["optimizer.lr=0.02", "seed=7"])
@pytest.mark.parametrize("damage", [Path.unlink, empty, None])
def test_another_job_is_refused_without_the_runs_own(run: Resumable, override: str, damage: Damage | None) -> None:
    """Also by a job.yaml that was changed to fit the other job."""
    job = run.folder / "job.yaml"
    if damage is None:
        job.write_text(dump(load(run.file, ["name=run", f"runs={run.folder.parent}", override]).job))
    else:
        damage(job)
    before = job.read_bytes() if job.exists() else None
    code, _ = run.resume(override)
    assert code == UserError.exit_code
    assert override.partition("=")[0] in run.error
    assert (job.read_bytes() if job.exists() else None) == before, "a refused job is not written"


def test_an_older_checkpoint_is_compared_with_its_own_record(
    run: Resumable, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is damaged, and the run resumes from step 2: later lines are no damage."""
    use_bad_batches(monkeypatch, (3,))
    [newest] = (run.folder / "checkpoints").glob(f"{SAVED}-*")
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    code, warnings = run.resume()
    assert code == 0
    assert [text for text in warnings if ".jsonl" in text or "job.yaml" in text] == []
    assert run.result() == runs.undisturbed


def delete(file: Path) -> None:
    file.unlink()


def change_rope(file: Path) -> None:
    """A value that changes what the model computes, and not whether its weights fit."""
    job = load(file, ["model.rope_theta=500"]).job
    file.write_text(dump(job))


@pytest.mark.parametrize("damage", [delete, empty, fill_with_zeros, change_rope])
def test_a_run_with_a_damaged_job_is_read_as_the_checkpoint_recorded_it(run: Resumable, damage: Damage) -> None:
    before = load_model(str(run.folder), device="cpu", devices=1)
    damage(run.folder / "job.yaml")
    told: list[str] = []
    after = load_model(str(run.folder), device="cpu", devices=1, reporter=RecordingReporter(told))
    assert after.model == before.model
    assert len(told) == 1
    assert str(run.folder / "job.yaml") in told[0]


def test_a_folder_without_job_and_checkpoints_is_not_a_run(tmp_path: Path) -> None:
    assert job_of_run(RunFolder(tmp_path)) is None
