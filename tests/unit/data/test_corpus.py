from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from error_assertions import raises_error

from forerun.config.schema import Data, Part
from forerun.data.corpus import Corpus, Dialect, applies_template, open_corpus
from forerun.data.order.batches import Batches
from forerun.data.source.columns import FORMS
from forerun.data.source.rows import SourceRow
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import ByteTokenizer

BYTES = Dialect(ByteTokenizer())
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def opened(data: Data, sequence: int = 8, dialect: Dialect = BYTES, vocab: int | None = None) -> Corpus:
    return open_corpus(data, dialect, sequence=sequence, vocab=vocab)


def jsonl(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(corpus: Corpus) -> bytes:
    """All tokens of a concatenated corpus, the ends as |."""
    tokens = corpus.rows.take(range(len(corpus.rows)))
    flat = tokens["tokens"].ravel()[tokens["segments"].ravel() > 0]
    return b"".join(b"|" if token == 256 else bytes([token]) for token in flat.tolist()).removesuffix(b"|")


def test_a_folder_becomes_rows_whose_tokens_read_as_the_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    corpus = opened(Data(path=str(tmp_path)), sequence=5)
    assert said(corpus) == b"first|second"
    assert corpus.lines() == ["2 files, text  2 documents  13 tokens  3 rows of 5  13.3% padding"]


def test_the_same_texts_give_the_same_rows_whatever_the_files(tmp_path: Path) -> None:
    texts = ["first", "second\nline", "é", 'a "quoted" one']
    rows = [{"text": text} for text in texts]
    places = [jsonl(tmp_path / "a.jsonl", rows), str(tmp_path / "b.jsonl.gz"), str(tmp_path / "c.csv")]
    Path(places[1]).write_bytes(gzip.compress(Path(places[0]).read_bytes()))
    Path(places[2]).write_text("text\n" + "".join('"' + text.replace('"', '""') + '"\n' for text in texts))
    found = [opened(Data(path=place)) for place in places]
    assert {said(corpus) for corpus in found} == {"|".join(texts).encode()}
    assert len({corpus.digest for corpus in found}) == 1


def test_conversations_stay_whole_and_only_answers_are_learned(tmp_path: Path) -> None:
    place = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}] * 3)
    corpus = opened(Data(path=place, chat_template="chatml"), sequence=80)
    arrays = corpus.rows.take([0])
    learned = arrays["targets"][0][arrays["weights"][0] > 0]
    assert bytes(learned[learned < 256].tolist()) == b"Hello<|im_end|>"
    assert corpus.parts[0].line.startswith("1 file, jsonl, chat, column messages  3 documents")


def test_conversations_without_a_template_are_refused(tmp_path: Path) -> None:
    place = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with raises_error("E-DATA-009") as refused:
        opened(Data(path=place))
    assert "data.chat_template=chatml" in refused.value.fix
    own = Dialect(ByteTokenizer(), template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert len(opened(Data(path=place, loss_on="all"), dialect=own).rows) == 1


def test_pairs_are_refused_and_ids_need_a_bound(tmp_path: Path) -> None:
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with raises_error("E-DATA-004"):
        opened(Data(path=pairs))
    ids = jsonl(tmp_path / "ids.jsonl", [{"input_ids": [1, 2, 300]}])
    with raises_error("E-DATA-003"):
        opened(Data(path=ids))
    with raises_error("E-DATA-097", "300", "300"):
        opened(Data(path=ids), vocab=300)
    assert opened(Data(path=ids), vocab=301).largest == 300


def test_bad_rows_are_passed_over_if_the_job_says_so_and_the_rest_is_as_if_they_were_not_there(tmp_path: Path) -> None:
    good = [{"text": f"text {number}"} for number in range(20)]
    clean = opened(Data(path=jsonl(tmp_path / "clean.jsonl", good)))
    lines = [json.dumps(row) for row in good]
    lines[3:3] = ['{"text": 7}', "not json"]
    (tmp_path / "dirty.jsonl").write_text("\n".join(lines))
    dirty = str(tmp_path / "dirty.jsonl")
    with raises_error("E-DATA-071", "dirty.jsonl,", "4"):
        opened(Data(path=dirty))
    skipped = opened(Data(path=dirty, bad_rows=2))
    assert [str(bad.place).rpartition("/")[2] for bad in skipped.parts[0].store.skipped] == [
        "dirty.jsonl, line 4",
        "dirty.jsonl, line 5",
    ]
    assert "2 bad rows" in skipped.lines()[0]
    for step in range(10):
        one, two = (Batches(corpus.rows, seed=1, batch=4).batch_at(step) for corpus in (clean, skipped))
        assert np.array_equal(one.tokens, two.tokens)
        assert np.array_equal(one.weights, two.weights)


def test_a_mixture_draws_by_weight(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 400)
    (tmp_path / "b.txt").write_text("b" * 4000)
    parts = {name: Part(path=str(tmp_path / f"{name}.txt"), weight=weight) for name, weight in (("a", 3), ("b", 1))}
    corpus = opened(Data(mixture=parts))
    batches = Batches(corpus.rows, seed=0, batch=64)
    drawn = Counter(part for step in range(64) for part, *_ in batches.examples_at(step))
    assert drawn == {0: 3072, 1: 1024}
    assert [line.partition(":")[0] for line in corpus.lines()] == ["a", "b"]
    assert "1 passes per" in corpus.lines()[1]


def test_validation_is_kept_apart(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(200)]
    place = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    corpus = opened(Data(path=place, validation=0.2))
    kept = corpus.parts[0].store.validation
    assert kept is not None
    assert 20 < len(kept) < 60
    tokens, _ = kept.read(0, kept.tokens)
    apart = set(bytes(tokens[tokens < 256].tolist()).decode().replace("document", "|document").split("|")[1:])
    learned = set(said(corpus).decode().split("|"))
    assert apart | learned == set(texts)
    assert not apart & learned


def test_the_digest_changes_with_what_is_learned(tmp_path: Path) -> None:
    place = jsonl(tmp_path / "a.jsonl", [{"prompt": "What?", "completion": "That."}])
    digests = {
        opened(Data(path=place, **settings)).digest
        for settings in ({}, {"loss_on": "all"}, {"packing": "concatenate"}, {"too_long": "keep_end"})
    }
    assert len(digests) == 4


PAGE = (Path(__file__).resolve().parents[3] / "docs/how-to/data.md").read_text()
TABLE = PAGE.partition("<!-- formats:")[2].partition("<!-- end of formats -->")[0]
FORMATS = re.findall(r"^\| `([^`]+)`( \(ShareGPT\))? \| `(\{.*\})` \|", TABLE, re.M)


def test_the_page_has_every_form() -> None:
    assert {form for form, _, _ in FORMATS} == set(FORMS)


@pytest.mark.parametrize(("form", "style", "row"), FORMATS)
def test_the_examples_of_the_page_are_read_as_it_says(form: str, style: str, row: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(row)
    source = open_source(Part(path=str(tmp_path / "a.jsonl")))
    assert source.form == form
    assert ("ShareGPT" in source.recognised) == bool(style)
    assert source.unused == []
    (found,) = source.rows(source.pieces(1 << 20)[0])
    assert isinstance(found, SourceRow), found
    if not style:
        assert found.values == json.loads(row)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize("template", [None, "model", "job"])
def test_prompts_become_messages_if_there_is_a_template(form: str, wanted: bool | None, template: str | None) -> None:
    data = Data(path="a", apply_template=wanted, chat_template="chatml" if template == "job" else None)
    applied = applies_template(form, data, "{{ messages }}" if template == "model" else None)
    if form in ("prompt/completion", "alpaca"):
        assert applied == (template is not None if wanted is None else wanted)
    else:
        assert applied == (wanted is True and form == "chosen/rejected")
