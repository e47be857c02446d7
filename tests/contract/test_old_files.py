"""Files of an older version still open: checkpoints, token stores and teacher caches.

`tests/old_files` has the files, and in `expected.json` what the older version read from them.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from forerun.checkpoint.reader import Reader
from forerun.config.load import load
from forerun.config.schema import Job
from forerun.data.teacher_cache.reader import CachedTeacherRows
from forerun.data.tokens.store import open_store
from forerun.hardware.devices import choose
from forerun.inputs.job_corpus import open_corpus
from forerun.inputs.resolve_job import resolve
from forerun.run.train import TrainResult, program_on, train
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics

OLD_FILES = Path(__file__).resolve().parents[1] / "old_files"
EXPECTED: dict[str, Any] = json.loads((OLD_FILES / "expected.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the files, because a run writes to its folder."""
    return Path(shutil.copytree(OLD_FILES, tmp_path / "old_files"))


def job_of(folder: Path, name: str, *overrides: str) -> Job:
    return load(folder / f"{name}.yaml", [f"runs={folder / 'runs'}", *overrides]).job


def trained(job: Job) -> TrainResult:
    with make_display(io.StringIO()) as display:
        finished = train(job, display)
    assert finished is not None
    return finished


def digest(array: Any) -> str:
    values = np.asarray(array)
    return f"{values.dtype}{list(values.shape)} {hashlib.sha256(values.tobytes()).hexdigest()[:16]}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("name", "run", "step"), [("texts", "texts", 2), ("conversations", "conversations-complete", 3)]
)
def test_checkpoint_has_the_same_arrays(folder: Path, name: str, run: str, step: int) -> None:
    program = program_on(resolve(job_of(folder, name)), choose("cpu", 1), None)
    restored = Reader(folder / "runs" / run / "checkpoints").restore_newest(program.saved(program.state))
    assert restored is not None
    assert (restored.step, restored.skipped) == (step, ())
    leaves = jax.tree_util.tree_flatten_with_path(restored.state)[0]
    assert {jax.tree_util.keystr(path): digest(leaf) for path, leaf in leaves} == EXPECTED["arrays"][run]


def test_run_resumes_with_the_loss_of_a_run_without_a_stop(folder: Path) -> None:
    finished = trained(job_of(folder, "texts", "name=texts"))
    assert finished.summary["resumed_at"] == 2
    losses = {str(row["step"]): row["loss"] for row in read_metrics(folder / "runs" / "texts" / "metrics.jsonl")}
    assert losses == pytest.approx(EXPECTED["losses"]["texts"], rel=1e-5)
    assert Reader(folder / "runs" / "texts" / "checkpoints").newest() == 3


def test_finished_run_is_not_run_again(folder: Path) -> None:
    run = folder / "runs" / "conversations-complete"
    before = contents(run)
    finished = trained(job_of(folder, "conversations", "name=conversations-complete"))
    assert finished.state is None
    assert finished.summary == json.loads(before["summary.json"]) | {"resumed_at": 3}
    assert contents(run) == before


@pytest.mark.parametrize("name", sorted(EXPECTED["stores"]))
def test_job_finds_its_token_store(folder: Path, name: str) -> None:
    """The key that the job computes names the old store, so nothing is tokenized again.

    The encoding of conversations has a newer version, so they are tokenized once more. A run resumes if its tokens are
    the same, because a checkpoint records the digest of the tokens and not the key.
    """
    expected = EXPECTED["stores"][name]
    before = contents(folder / "tokens")
    opened = open_corpus(job_of(folder, name))
    assert len(opened.rows) > 0
    after = contents(folder / "tokens")
    assert {path: after.get(path) for path in before} == before
    known = {each["key"] for each in EXPECTED["stores"].values()}
    added = {path.partition("/")[0] for path in after} - known
    assert len(added) == (1 if name == "conversations" else 0)
    old = open_store(folder / "tokens" / expected["key"], verify=True)
    store = open_store(folder / "tokens" / added.pop(), verify=True) if added else old
    assert store.train.digest == old.train.digest
    ids, learned = store.train.read(0, store.train.tokens)
    assert ids.tolist() == expected["ids"]
    assert (None if learned is None else learned.astype(int).tolist()) == expected["learned"]
    assert store.train.begins(np.arange(len(store.train) + 1)).tolist() == expected["begins"]


def test_ids_of_texts_are_their_bytes(folder: Path) -> None:
    """An oracle without forerun's reader: UTF-8 bytes and, after each document, the id 256."""
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text("utf-8").splitlines()]
    assert EXPECTED["stores"]["texts"]["ids"] == [id for text in texts for id in [*text.encode(), 256]]


def test_teacher_cache_has_the_same_logits(folder: Path) -> None:
    cache = CachedTeacherRows(folder / "teacher_cache", ("values", "ids", "tail"), temperature=1.0, ids=np.int32)
    taken = cache.take(np.arange(5))
    assert {name: digest(array) for name, array in taken.items()} == EXPECTED["teacher_cache"]
