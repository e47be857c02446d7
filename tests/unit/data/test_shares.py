"""What is held out for validation, how often the rest is seen, and what is warned about."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_assertions import assert_error, raises_error

from forerun.config.schema import Data
from forerun.data.corpus import Corpus, Dialect, open_corpus, recipe_of
from forerun.data.inspect import summary_lines
from forerun.data.inspect.corpus_report import CorpusReport, Lengths, SourceSummary
from forerun.data.inspect.findings import findings
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import ByteTokenizer
from forerun.data.tokens.recipe import is_validation
from forerun.errors import UserError
from forerun.hub.chat.template import CHATML

BYTES = Dialect(ByteTokenizer())


def opened(tmp_path: Path, place: Path, dialect: Dialect = BYTES, *, sequence: int = 16, **data: Any) -> Corpus:
    section = Data(path=str(place), store=str(tmp_path / "store"), workers=1, **data)
    return open_corpus(section, dialect, sequence=sequence)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three text files of 1,000 bytes, of which 2 % by the hash are exactly one."""
    folder = tmp_path / "three"
    folder.mkdir()
    texts = (f"{n:04d} ".ljust(1000, "x") for n in itertools.count())
    held = next(text for text in texts if is_validation({"text": text}, 0.02))
    others = itertools.islice((text for text in texts if not is_validation({"text": text}, 0.02)), 2)
    for name, text in zip("abc", [held, *others], strict=True):
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_the_real_share_is_said_and_a_far_one_is_a_warning(tmp_path: Path, three: Path) -> None:
    corpus = opened(tmp_path, three, validation=0.02)
    held = corpus.parts[0].held_out
    assert held is not None
    assert (held.held, held.count, held.share) == (1, 3, pytest.approx(1001 / 3003))
    (warning,) = corpus.warnings
    assert "33.3 %" in warning
    assert "data.validation_by=rows" in warning
    assert "33.3 %" in corpus.lines()[0]
    near = {share: replace(held, wanted=share).is_far for share in (0.16, 0.17, 0.6, 0.67)}
    assert near == {0.16: True, 0.17: False, 0.6: False, 0.67: True}, "a third is near between a sixth and two thirds"


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_share_that_holds_out_nothing_is_rejected(tmp_path: Path, share: float) -> None:
    texts = (f"{n} ".ljust(1000, "x") for n in itertools.count())
    (tmp_path / "a.txt").write_text(next(text for text in texts if not is_validation({"text": text}, share)))
    with pytest.raises(UserError) as caught:
        opened(tmp_path, tmp_path / "a.txt", validation=share)
    assert_error(caught.value, "E-DATA-226", what=f"{share:g}", fix="data.validation_by=rows")
    corpus = opened(tmp_path, tmp_path / "a.txt", validation=share, validation_by="rows")  # the fix
    assert corpus.kept is not None
    assert len(corpus.kept) == round(share * 63)  # 1,001 tokens in rows of 16
    assert opened(tmp_path, tmp_path / "a.txt", validation=0.0).kept is None


@pytest.mark.parametrize("by", ["documents", "rows"])
def test_one_row_cannot_be_held_out(tmp_path: Path, by: str) -> None:
    (tmp_path / "a.txt").write_text(next(f"{n}" for n in itertools.count() if not is_validation({"text": f"{n}"}, 0.1)))
    with pytest.raises(UserError) as caught:
        opened(tmp_path, tmp_path / "a.txt", validation=0.1, validation_by=by)
    assert_error(caught.value, "E-DATA-226", fix="data.validation=0 ")
    assert "validation_by" not in caught.value.fix


def test_rows_are_held_out_exactly_once_and_in_the_asked_share(tmp_path: Path, three: Path) -> None:
    whole = opened(tmp_path, three)
    corpus = opened(tmp_path, three, validation=0.02, validation_by="rows")
    rows = -(-3002 // 16)  # 3 x 1,001 tokens, the last of which is a target only
    assert corpus.kept is not None
    assert (len(whole.rows), len(corpus.rows), len(corpus.kept)) == (
        rows,
        rows - round(0.02 * rows),
        round(0.02 * rows),
    )
    every = {row.tobytes() for row in _numbered(whole)}
    train, kept = ({row.tobytes() for row in _numbered(one)} for one in (corpus, replace(corpus, rows=corpus.kept)))
    assert not train & kept
    assert train | kept == every
    assert corpus.warnings == []
    assert corpus.digest != whole.digest
    assert corpus.parts[0].store.folder == whole.parts[0].store.folder, "the tokens are those of a job without"
    examples = [example for n in range(len(corpus.rows)) for example in corpus.rows.examples(n)]
    examples += [example for n in range(len(corpus.kept)) for example in corpus.kept.examples(n)]
    assert sorted(examples) == sorted(e for n in range(rows) for e in whole.rows.examples(n))


def _numbered(corpus: Corpus) -> Any:
    """The targets of every row: rows of x alone are equal, so the row's own examples make them different."""
    taken = corpus.rows.take(np.arange(len(corpus.rows)))["targets"]
    names = [json.dumps(corpus.rows.examples(n)).encode().ljust(64) for n in range(len(corpus.rows))]
    return [np.concatenate([row, np.frombuffer(name, np.uint8)]) for row, name in zip(taken, names, strict=True)]


def test_pairs_are_held_out_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"chosen": "a", "rejected": "b", "prompt": "c"}\n')
    with raises_error("E-DATA-006", "validation_by"):
        open_corpus(
            Data(path=str(tmp_path / "a.jsonl"), validation=0.1, validation_by="rows"), BYTES, sequence=16, pairs=True
        )


@pytest.mark.parametrize(("rows", "batch", "steps"), [(19, 32, 500), (395, 8, 200), (40, 8, 5), (1000, 3, 7)])
def test_the_figures_of_an_epoch_agree(rows: int, batch: int, steps: int) -> None:
    """500 steps of 32 rows over 19 rows see each 842 times."""
    look = CorpusReport(
        title="", sources=[SourceSummary("data", "", 1, 9, 9, 9)], form="text", tokenizer="bytes", vocabulary=257,
        lengths=Lengths(np.array([4]), 1), sequence=8, packing="concatenate", rows=rows, padding_share=0.0,
        batch=batch, seed=0, steps=steps,
    )  # fmt: skip
    seen = Fraction(steps * batch, rows)
    assert look.epochs == pytest.approx(float(seen))
    assert look.steps_per_epoch * look.epochs == pytest.approx(steps)
    shown = summary_lines.epoch(look)
    assert float(shown.split(" step")[0]) == pytest.approx(rows / batch, rel=5e-3)
    assert float(shown.split(" are ")[1].split(" epoch")[0]) == pytest.approx(float(seen), rel=5e-3)
    assert not any("whole steps" in one.why for one in findings(look))


def test_prompts_and_completions_use_the_chat_template_unless_the_job_rejects_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi", "completion": "yes"}\n{"prompt": "and", "completion": "no"}\n')
    chat = Dialect(ByteTokenizer(), CHATML)
    place = tmp_path / "a.jsonl"
    plain = opened(tmp_path, place, chat, apply_template=False)
    without = opened(tmp_path, place)
    assert plain.digest == without.digest
    assert plain.parts[0].store.train.read(0, 6)[0].tolist() == [*b"hiyes", 256]
    assert "as plain text" in plain.lines()[0]
    text = b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    for own, settings, words in (
        (chat, {}, "with the model's chat template (data.apply_template=false: plain text)"),
        (chat, {"apply_template": True}, "with the model's chat template"),
        (BYTES, {"chat_template": "chatml"}, "with data.chat_template"),
    ):
        applied = opened(tmp_path, place, own, sequence=128, **settings)
        assert words in applied.lines()[0]
        assert applied.digest != plain.digest
        ids, learned = applied.parts[0].store.train.read(0, len(text) + 1)
        assert ids.tolist() == [*text, 256]
        assert learned is not None
        assert bytes(ids[learned][:-1].tolist()) == b"yes<|im_end|>"
    with raises_error("E-DATA-009"):
        opened(tmp_path, place, apply_template=True)
    for key, value in (("chat_template", "chatml"), ("system", "Be brief.")):
        (warning,) = opened(tmp_path, place, apply_template=False, **{key: value}).warnings
        assert f"data.{key}" in warning
        assert "data.apply_template=false" in warning


def test_a_likely_separator_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(f"story {n}\n" for n in range(9)))
    (warning,) = opened(tmp_path, tmp_path / "a.txt").warnings
    assert "data.separator='<|endoftext|>'" in warning
    corpus = opened(tmp_path, tmp_path / "a.txt", separator="<|endoftext|>")
    assert corpus.warnings == []
    assert corpus.parts[0].store.counts.documents == 9
    assert corpus.parts[0].store.train.read(0, 16)[0].tolist() == [*b"story 0", 256, *b"story 1", 256]


# The first two were computed by the version before data.separator and data.apply_template. The others have a chat
# template, and changed once with version 2 of the encoding of conversations.
KEYS = {
    "a.txt": "9eac6dd40a66fd8617943b95f3770faf",
    "b.jsonl": "382cae35f6a480465881a003b34e9c33",
    "c.jsonl": "f7a0789a1352bb5a6390123c1f141211",
    "d.jsonl": "b6a613d19d5de99314fd4b3adea84934",
}


def test_stores_of_earlier_versions_keep_their_keys(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "c.jsonl").write_text('{"chosen": "a", "rejected": "b", "prompt": "c"}\n')
    chat = '{"messages": [{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n'
    (tmp_path / "d.jsonl").write_text(chat)

    def key(name: str, **more: Any) -> str:
        data = Data(path=str(tmp_path / name), chat_template="chatml", validation=0.25, **more)
        source = open_source(data)
        return recipe_of(source, data, BYTES, pairs=name == "c.jsonl").key(source)

    assert {name: key(name, **({"apply_template": False} if name == "b.jsonl" else {})) for name in KEYS} == KEYS
    others = [key("a.txt", separator=" "), key("b.jsonl", apply_template=True), key("c.jsonl", apply_template=True)]
    others += [key("d.jsonl", system="s"), key("a.txt", limit=1), key("a.txt", limit=2)]
    others += [key("b.jsonl", columns={"prompt": text}) for text in ("{completion}", "{completion} ")]
    assert len({*KEYS.values(), *others}) == 12
    assert key("b.jsonl") == key("b.jsonl", apply_template=True)  # the default with a chat template
