"""Runs that learn preferences: interrupted or not, they are the same; what the reference says is kept, and mended."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import raises_error

from forerun.checkpoint.store import CheckpointStore
from forerun.config.load import load
from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.order.pairs import PairReferences
from forerun.errors import UserError
from forerun.hardware.devices import choose
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run import train as loop
from forerun.run.preference_reference import read_log_probs, with_reference, write_log_probs
from forerun.run_folder.run_folder import RunFolder
from forerun.supervise.worker import silent_worker
from forerun.track.display.make_display import make_display
from forerun.track.metrics import read_metrics

MakeJob = Callable[..., Job]
ROWS = [
    {"prompt": f"Is {n} small?", "chosen": " yes" if n < 20 else " no, large", "rejected": " who knows" + "?" * (n % 4)}
    for n in range(40)
]


@pytest.fixture
def pairs(tmp_path: Path, job_file: Path) -> MakeJob:
    """The tiny job on forty pairs, some of them kept back."""
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    given = [f"runs={tmp_path / 'runs'}", f"data.path={tmp_path / 'pairs.jsonl'}", f"data.store={tmp_path / 'store'}"]
    given += [
        "sequence=96",
        "batch=4",
        "preferences.beta=0.5",
        "data.validation=0.2",
        "validation.every=6",
        "data.tokenizer=bytes",
    ]
    return lambda *overrides: load(job_file, [*given, *overrides]).job


def run(job: Job) -> str:
    out = io.StringIO()
    with make_display(out) as display:
        assert loop.train(job, display) is not None
    return out.getvalue()


def figures(job: Job, *names: str) -> list[list[float]]:
    rows = read_metrics(Path(job.runs) / job.name / "metrics.jsonl")
    return [[row[name] for name in names] for row in rows if names[0] in row]


def saved(job: Job) -> list[Any]:
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    program = loop.program_on(resolved, choose("cpu", 1), corpus.rows.epoch)
    with closing(CheckpointStore(Path(job.runs) / job.name / "checkpoints", keep=2)) as store:
        return [np.array(leaf) for leaf in jax.tree.leaves(store.restore(6, program.saved(program.state)))]


class Interrupted:
    """Batches up to this one."""

    def __init__(self, batches: Any, last: int) -> None:
        self._batches, self._last = batches, last

    def batch_at(self, index: int) -> Any:
        if index >= self._last:
            raise RuntimeError("no more")
        return self._batches.batch_at(index)


@pytest.mark.parametrize("reference", ["cached", "beside", "base"])
def test_an_interrupted_run_is_the_whole_run(reference: str, pairs: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["lora.rank=2", "lora.base=float32", "lora.dropout=0.1"] if reference == "base" else []
    given = [f"preferences.reference={reference}", *more]
    whole, torn = pairs("name=whole", *given), pairs("name=torn", *given)
    said = run(whole)
    validated = figures(whole, "validation_rewards/accuracies", "validation_loss")
    assert f"validation at step 6: loss {validated[0][1]:.4f}, accuracy {validated[0][0]:.1%}" in said
    assert "perplexity" not in said
    healthy = loop.batches_of
    with monkeypatch.context() as patch:
        patch.setattr(loop, "batches_of", lambda *args: Interrupted(healthy(*args), 5))
        with pytest.raises(RuntimeError, match="no more"):
            run(torn)
    note = Path(torn.runs) / "torn" / "reference.json"
    noted = note.read_bytes() if note.exists() else None
    if noted is not None:
        note.write_bytes(b"")
    said = run(torn)
    assert "step 4 from" in said
    assert (noted is not None) == (reference == "cached") == (str(note) in said)
    assert (note.read_bytes() if note.exists() else None) == noted
    names = ("loss", "rewards/margins", "logps/chosen", "pairs")
    assert figures(torn, *names) == figures(whole, *names)
    assert figures(torn, "validation_loss")[-1] == figures(whole, "validation_loss")[-1]
    for have, want in zip(saved(torn), saved(whole), strict=True):
        np.testing.assert_array_equal(have, want)


def asked(job: Job, folder: Path) -> tuple[Corpus, str]:
    """What comes before the first step, and what is told of it."""
    resolved, out = resolve_model(job), io.StringIO()
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    folder.mkdir(exist_ok=True)
    program = loop.program_on(resolved, choose("cpu", 1), corpus.rows.epoch)
    with make_display(out) as display:
        return with_reference(resolved, program, corpus, RunFolder(folder), display, silent_worker()), out.getvalue()


def test_what_the_reference_says_is_kept_and_mended(pairs: MakeJob, tmp_path: Path) -> None:
    corpus, said = asked(pairs(), tmp_path / "first")
    assert "40 pairs, 40" in said
    assert corpus.kept is not None
    assert "40 pairs, 0" in asked(pairs(), tmp_path / "second")[1]
    [train] = (tmp_path / "store").glob("*/reference/train-*.bin")
    content = train.read_bytes()
    many = json.loads(content.partition(b"\n")[0])["pairs"]
    known = read_log_probs(train, many)
    assert known is not None
    assert isinstance(corpus.rows.extra, PairReferences)
    np.testing.assert_array_equal(known, corpus.rows.extra.values[0])
    known[[1, 5]] = np.nan
    write_log_probs(train, known)
    assert "40 pairs, 2" in asked(pairs(), tmp_path / "third")[1]
    assert train.read_bytes() == content
    train.write_bytes(content[:-2] + b"xx")
    said = asked(pairs(), tmp_path / "fourth")[1]
    assert f"40 pairs, {many} computed now" in said
    assert "is damaged and is computed again" in said
    assert train.read_bytes() == content
    other = asked(pairs("seed=1"), tmp_path / "other")[1]
    assert "40 pairs, 40" in other, "another model, other numbers"


def test_a_resumed_run_wants_the_model_it_began_with(pairs: MakeJob, tmp_path: Path) -> None:
    asked(pairs(), tmp_path / "run")
    for file in (tmp_path / "store").glob("*/reference/*.bin"):
        file.unlink()
    (tmp_path / "run" / "reference.json").write_text('{"base": "00000000"}')
    with pytest.raises(UserError, match=r"E-RUN-0(29|36)"):
        asked(pairs(), tmp_path / "run")


def test_pairs_and_jobs_that_do_not_go_together(pairs: MakeJob, make_job: MakeJob, tmp_path: Path) -> None:
    with raises_error("E-DATA-004") as caught:
        open_corpus(resolve_model(make_job(f"data.path={tmp_path / 'pairs.jsonl'}", "data.tokenizer=bytes")))
    assert "preferences: dpo" in caught.value.fix
    with pytest.raises(UserError, match="the rows are text"):
        open_corpus(resolve_model(make_job("preferences=dpo")))
    for wrong, said in (
        ("data.too_long=split", "a pair cannot be split"),
        ("data.too_long=keep_start", "cannot be cut at its end"),
        ("data.loss_on=all", "cannot be used with preference pairs"),
        ("data.packing=whole", "cannot be used with preference pairs"),
    ):
        with pytest.raises(UserError, match=said):
            open_corpus(resolve_model(pairs(wrong)))
    for wrong in ("preferences.reference=base", "preferences.smoothing=0.1", "objective=my_loss:Loss"):
        with pytest.raises(UserError):
            pairs(wrong)
    with raises_error("E-JOB-035"):
        pairs("preferences.reference=beside", "lora.rank=2")
