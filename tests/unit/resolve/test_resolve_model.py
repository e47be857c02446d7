from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from error_assertions import assert_error

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.resolve.job_corpus import open_corpus, with_steps
from forerun.resolve.resolve_model import resolve_model

MakeJob = Callable[..., Job]


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """Words for tokens: three of them and the end of a document at id 300."""
    words = {"it": 0, "was": 1, "[UNK]": 2, "<|endoftext|>": 300}
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    path.write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model})
    )
    return path


def test_steps_come_from_epochs(make_job: MakeJob, job_file: Path) -> None:
    tokens = len((job_file.parent / "text" / "tale.txt").read_bytes()) + 1  # and the end of the document
    rows = math.ceil((tokens - 1) / 16)
    resolved = with_steps(resolve_model(make_job("steps=null", "epochs=2.5")))
    assert resolved.steps == math.ceil(2.5 * rows / 8)
    assert resolved.job.epochs is None


def test_without_steps_and_epochs_it_is_one_epoch(make_job: MakeJob) -> None:
    job = make_job("steps=null")
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    assert resolved.with_data(corpus).steps == math.ceil(len(corpus.rows) / job.batch)


def test_the_vocabulary_is_the_tokenizers_in_whole_lanes(make_job: MakeJob, tokenizer_file: Path) -> None:
    assert resolve_model(make_job()).vocab == 384  # 257 bytes and an end, filled up to a multiple of 128
    assert resolve_model(make_job("model.vocab=257")).vocab == 257
    assert resolve_model(make_job(f"data.tokenizer={tokenizer_file}")).vocab == 384  # ids up to 300


def test_ids_beyond_the_embedding_are_refused(make_job: MakeJob, tokenizer_file: Path) -> None:
    job = make_job("model.vocab=300", f"data.tokenizer={tokenizer_file}")
    with pytest.raises(UserError) as refused:
        resolve_model(job).with_data(open_corpus(resolve_model(job)))
    assert_error(refused.value, "E-RUN-017", what="301", fix="model.vocab=301")
    assert "300" in refused.value.what
    enough = make_job("model.vocab=301", f"data.tokenizer={tokenizer_file}")
    assert resolve_model(enough).with_data(open_corpus(resolve_model(enough))).vocab == 301


def test_a_named_model_with_steps_needs_no_data(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("model=qwen3-0.6b", f"data.path={tmp_path / 'not there'}", "steps=10")
    assert resolve_model(job).job == job
    with pytest.raises(UserError):
        with_steps(resolve_model(job.model_copy(update={"steps": None})))
