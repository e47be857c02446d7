"""Runs that start before their data is tokenized: the same losses as with finished data, also if they are resumed."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.data.early import early_corpus, windows
from forerun.data.order.batches import Batches
from forerun.data.order.ledger import entries
from forerun.data.tokens import unit as tokens_unit
from forerun.errors import UserError
from forerun.resolve.job_corpus import open_arriving_corpus, open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run import train as loop
from forerun.track.display.plain import PlainDisplay
from forerun.track.metrics import read_metrics

MakeJob = Callable[..., Job]
STEPS = 8  # of 8 rows of 16 tokens: 1024 tokens
UNIT_BYTES = 512


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of half a KiB and windows of one unit and of two, instead of MiB."""
    monkeypatch.setattr(tokens_unit, "unit_bytes", lambda total: UNIT_BYTES)
    monkeypatch.setattr(windows, "FIRST_BYTES", UNIT_BYTES // 2)
    monkeypatch.setattr(windows, "LARGEST_BYTES", UNIT_BYTES + 1)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    texts = [f"{n}: it was the best of times, it was the worst of times, " * (1 + n % 3) for n in range(20)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def losses(job: Job) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(Path(job.runs) / job.name / "metrics.jsonl")}


def run(job: Job) -> str:
    lines = io.StringIO()
    loop.train(job, PlainDisplay(lines, clock=time.monotonic))
    return lines.getvalue()


class Interrupted(Exception):
    pass


def test_a_killed_run_with_an_empty_store_resumes_with_a_finished_one(
    rows: Path, make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [f"steps={STEPS}", f"data.path={rows}", "data.begin=early", "data.ledger=true", "data.workers=1"]
    partial = make_job(*common, "name=killed", f"data.store={tmp_path / 'growing'}")

    # ---- The first units are built. The others follow when the first batch is used, up to the sixth unit. ----
    may_go_on, built = threading.Event(), early_corpus.tokenize

    def tokenize(*arguments: Any, **options: Any) -> Any:
        built(*arguments, **options | {"shard": (0, 100)})
        may_go_on.wait()
        for unit in range(1, 6):
            found = built(*arguments, **options | {"shard": (unit, 100)})
        return found

    class Killed:
        def __init__(self, batches: Any) -> None:
            self._batches = batches

        def __getattr__(self, name: str) -> Any:
            return getattr(self._batches, name)

        def batch_at(self, step: int) -> Any:
            existing = {path.name[:10] for path in (tmp_path / "growing").glob("*/unit-*") if path.suffix != ".part"}
            if step == 0:
                assert existing == {"unit-00000"}
                found = self._batches.batch_at(step)
                may_go_on.set()
                return found
            if step == 4:
                raise Interrupted
            return self._batches.batch_at(step)

    batches_of = loop.batches_of
    with monkeypatch.context() as patched:
        patched.setattr(early_corpus, "tokenize", tokenize)
        patched.setattr(loop, "batches_of", lambda *given: Killed(batches_of(*given)))
        with pytest.raises(Interrupted):
            run(partial)
    assert not list((tmp_path / "growing").glob("*/index.json")), "the store is not finished"

    # ---- The store is finished, and the run resumes from its checkpoint of step 2 or 4 ----
    open_corpus(resolve_model(partial))
    said = run(partial)
    assert "step 2 from" in said or "step 4 from" in said

    # ---- A run on finished data ----
    whole = make_job(*common, "name=whole", f"data.store={tmp_path / 'growing'}")
    run(whole)
    assert len(losses(whole)) == STEPS
    assert losses(partial) == losses(whole)
    ledgers = [[*entries(Path(job.runs) / job.name / "ledger.jsonl")] for job in (partial, whole)]
    assert ledgers[0] == ledgers[1]

    # ---- The order is another one than that of complete data, which a run never changes ----
    first = [document for _, examples in ledgers[1][:1] for _, document, *_ in examples]
    assert max(first) < 5, "the first batch has the first documents"
    complete = make_job(*common, f"data.store={tmp_path / 'growing'}", "data.begin=all")
    assert open_corpus(resolve_model(complete)).digest != open_corpus(resolve_model(whole)).digest


def test_arriving_and_finished_data_have_the_same_mixture_and_validation(
    rows: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(rows.read_text().replace("best", "last"))
    mixture = [f"data.mixture.{name}.path={file}" for name, file in (("a", rows), ("b", other))]
    weights = ["data.mixture.a.weight=3", "data.mixture.b.weight=1"]
    common = ["data.path=null", *mixture, "data.begin=early", "data.validation=0.3", "data.packing=whole"]
    for at, more in enumerate(([], weights)):
        job = make_job(*common, *more, f"data.store={tmp_path / f'store{at}'}", "data.workers=2")
        arriving = open_arriving_corpus(job, None, (0, 1))
        try:
            seen = [Batches(arriving.rows, seed=1, batch=8).batch_at(step).tokens for step in range(30)]
        finally:
            arriving.close()
        finished = open_corpus(resolve_model(job))
        again = [Batches(finished.rows, seed=1, batch=8).batch_at(step).tokens for step in range(30)]
        assert np.array_equal(seen, again)
        assert arriving.digest == finished.digest
        assert arriving.kept is not None
        assert finished.kept is not None
        assert arriving.kept.digest == finished.kept.digest
        held = [one for part in arriving.parts if (one := part.held_out) is not None]
        assert all(0 < one.held < one.count for one in held), "only documents of the first window"
        assert sum(one.count for one in held) < 40


def test_a_bad_row_behind_the_first_window_ends_the_run_with_its_error(
    rows: Path, make_job: MakeJob, tmp_path: Path
) -> None:
    with rows.open("a") as file:
        file.write("not json\n")
    job = make_job(f"steps={STEPS}", f"data.path={rows}", "data.begin=early", f"data.store={tmp_path / 'store'}")
    with pytest.raises(UserError) as bad:
        run(job)
    assert bad.value.code.startswith("E-DATA-")
    assert "line 21" in str(bad.value)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["steps=null"], "E-JOB-151"),
        (["steps=null", "epochs=2"], "E-JOB-151"),
        (["preferences=dpo"], "E-JOB-152"),
        (["data.validation=0.1", "data.validation_by=rows"], "E-JOB-152"),
        (["data.shuffle=blocks"], "E-JOB-152"),
    ],
)
def test_what_needs_all_rows_first_is_refused(job_file: Path, more: list[str], code: str) -> None:
    with pytest.raises(UserError) as refused:
        load(job_file, ["data.begin=early", *more])
    assert refused.value.code == code
