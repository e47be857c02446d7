"""A teacher's cache under kill -9 and damage: the same bytes in the end, and never a wrong number to a student."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_assertions import assert_error, raises_error
from teacher_folder import write_teacher

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.data import checked_json
from forerun.data.corpus import Corpus
from forerun.data.teacher_cache import DRAFT, MANIFEST, CachedTeacherRows, Layout
from forerun.errors import UserError
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.teacher_targets import with_teacher_targets
from forerun.supervise.leader.leader_view import Member
from forerun.supervise.leader.verdicts import differing
from forerun.track.display.make_display import make_display
from forerun.verbs.write_cache import write_cache

JOB = """\
model: {layers: 1, embed: 16, heads: 2}
data: {path: text.txt, store: tokens, validation: 0.0}
sequence: 32
batch: 4
steps: 4
device: cpu
devices: 1
precision: {compute: float32}
sample: {tokens: 0}
distil: {teacher: ./teacher, cache: words, top_k: 8, temperature: 2.0}
"""
PATIENCE_SECONDS = 900
FACT = "data and cache digest"


def made(job: Job) -> str:
    """The cache of a job; what was said meanwhile."""
    said = io.StringIO()
    with make_display(said) as display:
        write_cache(resolve_model(job), display)
    return said.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, its teacher, and its cache `words`, whole."""
    here = tmp_path_factory.mktemp("cache")
    write_teacher(here / "teacher")
    text = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "text" / "carroll-alice.txt"
    (here / "text.txt").write_bytes(text.read_bytes()[:6000])
    (here / "job.yaml").write_text(JOB)
    said = made(load(here / "job.yaml").job)
    for value in ("188 rows", "32 tokens", "8 of 257 logits", "40 bytes a token", "16 shards"):
        assert value in said
    return here


@pytest.fixture
def job(folder: Path, tmp_path: Path) -> Callable[..., Job]:
    """The job with overrides, its cache a copy of its own."""
    shutil.copytree(folder / "words", tmp_path / "words")
    return lambda *overrides: load(folder / "job.yaml", [f"distil.cache={tmp_path / 'words'}", *overrides]).job


def student(job: Job) -> Corpus:
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    return with_teacher_targets(resolved, corpus)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(file: Path, at: int = 1000) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


@pytest.mark.timing
def test_killed_at_any_moment_it_ends_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "killed"
    words = [sys.executable, "-m", "forerun", "cache", str(folder / "job.yaml"), f"distil.cache={target}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(one) for one in sys.path if one)}
    for shards in (1, 6):  # killed when so many are there, then started again
        with (tmp_path / "log").open("ab") as log:
            child = subprocess.Popen(words, stdout=log, stderr=log, cwd=tmp_path, env=env)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len([*target.glob("*.bin")]) < shards and child.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.001)
        child.kill()
        assert child.wait() in (-signal.SIGKILL, 0), (tmp_path / "log").read_text()
    with suppress(FileNotFoundError):  # as if the kill had come in the middle of a shard and of the manifest
        (target / "00007.part").write_bytes(b"half a shard")
        (target / f"{MANIFEST}.part").write_text("{")
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert content(target) == content(folder / "words")


def test_it_may_end_between_any_two_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a shard has its name, and between that and its line in the manifest."""

    class Killed(BaseException):
        pass

    job, replace = load(folder / "job.yaml", [f"distil.cache={tmp_path / 'words'}"]).job, Path.replace
    for last in (0, 1, 2, 3, 8, 9):
        left = [last]

        def until(self: Path, target: Path, left: list[int] = left) -> Path:
            if self.suffix == DRAFT and left[0] == 0:
                raise Killed
            left[0] -= self.suffix == DRAFT
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", until)
        with pytest.raises(Killed):
            made(job)
    monkeypatch.undo()
    assert "cache: resumes, " in made(job)
    assert content(tmp_path / "words") == content(folder / "words")


def test_a_damaged_shard_is_found_before_use_and_made_again(folder: Path, job: Callable[..., Job]) -> None:
    words = Path(job().distil.cache)  # type: ignore[union-attr, arg-type]
    damage(words / "00003.bin")
    corpus = student(job())
    corpus.rows.take(np.arange(36))
    with pytest.raises(UserError) as caught:
        corpus.rows.take(np.arange(30, 40))
    assert_error(caught.value, "E-DATA-073", what=f"{words / '00003.bin'} ", why="row 36 ", fix="forerun cache JOB")
    (words / "00005.bin").unlink()
    with raises_error("E-DATA-073", "00005.bin"):
        student(job())
    said = made(job())
    assert "00003.bin" in said
    assert "164 of 188 rows" in said
    assert content(words) == content(folder / "words")


def test_what_a_student_reads_is_in_the_order_of_its_rows(folder: Path, job: Callable[..., Job]) -> None:
    corpus = student(job())
    numbers = np.array([187, 0, 36, 35])
    arrays = corpus.rows.take(numbers)
    assert [arrays[name].dtype.name for name in ("teacher_values", "teacher_ids", "teacher_tail")] == [
        "float16",
        "uint16",
        "float32",
    ]
    layout = Layout(188, 32, 8, 257, (1.0, 2.0))
    raw = b"".join((folder / "words" / f"{n:05d}.bin").read_bytes() for n in range(16))
    for n, number in enumerate(numbers):
        row = layout.unpacked(raw[number * layout.row_bytes : (number + 1) * layout.row_bytes])
        assert row is not None
        for name, one in zip(("values", "ids"), row[:2], strict=True):
            np.testing.assert_array_equal(arrays[f"teacher_{name}"][n], one)
        np.testing.assert_array_equal(arrays["teacher_tail"][n], row[2][:, 1])  # at temperature 2
    cooler = student(job("distil.temperature=1.0")).rows.take(numbers)["teacher_tail"]
    assert (cooler < arrays["teacher_tail"]).all()


@pytest.mark.parametrize("vocab", [65_536, 65_537, 1 << 24, (1 << 24) + 1])
def test_ids_take_the_fewest_bytes_that_hold_them(vocab: int) -> None:
    layout = Layout(3, 4, 2, vocab, (1.0,))
    assert layout.id_bytes == {65_536: 2, 65_537: 3, 1 << 24: 3, (1 << 24) + 1: 4}[vocab]
    ids = np.array([[0, vocab - 1], [1, vocab // 2], [vocab - 2, 3], [255, 256]], np.int32)
    values, tails = -np.arange(8, dtype=np.float16).reshape(4, 2), np.full((4, 1), 0.25, np.float32)
    row = layout.packed(values, ids, tails)
    assert len(row) == layout.row_bytes == 4 * (2 * (2 + layout.id_bytes) + 4) + 4
    for back, one in zip(layout.unpacked(row) or (), (values, ids, tails), strict=True):
        np.testing.assert_array_equal(back, one)
    for at in range(len(row)):
        assert layout.unpacked(bytes(byte ^ (n == at) for n, byte in enumerate(row))) is None


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("sequence=16",), "sequence: 32 in the cache, 16 in the job"),
        (("data.packing=whole",), "data: "),
        (("distil.top_k=9",), "distil.top_k: 8 in the cache, 9 in the job"),
        (
            ("distil.temperature=3.0",),
            "distil.temperature: 3, and the mass beyond the 8 likeliest tokens is known at 1 and 2 only",
        ),
        (("distil.teacher=./other",), "teacher: teacher in the cache, other in the job"),
        (("model.vocab=300",), None),
    ],
    ids=["sequence", "data", "top_k", "temperature", "teacher", "a larger vocabulary is fine"],
)
def test_a_cache_of_another_job_is_refused(
    job: Callable[..., Job], overrides: tuple[str, ...], why: str | None
) -> None:
    if why is None:
        assert "teacher_ids" in student(job(*overrides)).rows.take([0])
        return
    with pytest.raises(UserError) as caught:
        student(job(*overrides))
    assert_error(caught.value, "E-RUN-040", why=why, fix="forerun cache JOB distil.cache=OTHER_FOLDER")


def test_hosts_with_different_copies_are_told_apart(job: Callable[..., Job], tmp_path: Path) -> None:
    """One shard of other words, whole in itself, as of a teacher that was trained on meanwhile."""
    mine = student(job()).digest
    file = tmp_path / "words" / MANIFEST
    manifest = checked_json.decode(file.read_bytes())
    manifest["shards"][3] = manifest["shards"][2]
    file.write_bytes(checked_json.encode(manifest))
    theirs = student(job()).digest
    members = {n: Member(n, "", f"host-{n}", 1, 0.0, facts={FACT: said}) for n, said in enumerate((mine, theirs))}
    told = differing(members)
    assert told is not None
    assert told.why == f"host 0: {mine}; host 1: {theirs}"
    assert "distil.cache" in told.fix
    assert differing({0: members[0], 1: replace(members[1], facts=members[0].facts)}) is None


def test_what_is_not_there_or_not_finished_is_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    with raises_error("E-RUN-039"):
        student(job(f"distil.cache={tmp_path / 'none'}"))
    manifest = tmp_path / "words" / MANIFEST
    content = checked_json.decode(manifest.read_bytes())
    manifest.write_bytes(checked_json.encode({**content, "shards": [*content["shards"][:-2], None, None]}))
    with raises_error("E-DATA-072", "14", "16"):
        student(job())
    manifest.write_bytes(checked_json.encode({**content, "format": 7}))
    with raises_error("E-DATA-075"):
        student(job())


def test_teachers_that_cannot_be_asked(job: Callable[..., Job], folder: Path, tmp_path: Path) -> None:
    with raises_error("E-RUN-028", "distil.teacher:", "qwen3-0.6b"):
        made(job("distil.teacher=qwen3-0.6b"))
    with raises_error("E-RUN-005"):
        made(job("distil=null"))
    with raises_error("E-RUN-006", "distil.cache"):
        made(job("distil.cache=null"))
    shutil.copytree(folder / "teacher", tmp_path / "teacher")
    file = tmp_path / "teacher" / "tokenizer.json"
    said: dict[str, Any] = json.loads(file.read_text())
    said["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(said))
    with pytest.raises(UserError) as caught:
        made(job(f"distil.teacher={tmp_path / 'teacher'}"))
    assert_error(caught.value, "E-RUN-042", what=str(tmp_path / "teacher"), why="bytes:257")
    assert "tokenizer.json:" in caught.value.why


def test_a_reader_travels_to_another_process_as_a_name(folder: Path) -> None:
    import pickle

    reader = CachedTeacherRows(folder / "words", ("v", "i", "t"), 1.0, np.uint16, first=3)
    before = reader.take(np.arange(4))
    packed = pickle.dumps(reader)
    assert len(packed) < 1000
    for name, array in pickle.loads(packed).take(np.arange(4)).items():
        np.testing.assert_array_equal(array, before[name])
