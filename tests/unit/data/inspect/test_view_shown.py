"""The page and the terminal: the same figures, whole markup, no way in for what a document says."""

from __future__ import annotations

import io
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from forerun.data.documents import in_memory
from forerun.data.inspect.corpus_report import CorpusReport, SkippedRows
from forerun.data.inspect.open_corpus import samples_of
from forerun.data.inspect.page import page
from forerun.data.inspect.terminal import print_report
from forerun.data.order.whole_documents import WholeDocuments
from forerun.data.tokenizer import ByteTokenizer

EVIL = "<script>alert(1)</script> & \"'\x1b[2J"
EMPTY = {"meta", "rect", "line", "br"}


class Markup(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(text: str) -> Markup:
    markup = Markup()
    markup.feed(text)
    markup.close()
    return markup


@pytest.fixture
def look(clean: CorpusReport) -> CorpusReport:
    tokenizer = ByteTokenizer()
    texts = [EVIL, "question? answer \nend", "naïve 🙂"]
    documents = [[*tokenizer.encode(text).tolist(), 256] for text in texts]
    masks = [[n > len(document) // 2 for n in range(len(document))] for document in documents]
    rows = WholeDocuments(in_memory(documents, masks), 64)
    return replace(
        clean,
        title=f"{EVIL}.yaml",
        samples=samples_of(rows.take, range(len(rows)), tokenizer),
        skipped=12,
        skipped_first=[SkippedRows(f"{EVIL}.jsonl, line {n}", EVIL) for n in range(10)],
    )


def printed(look: CorpusReport, width: int = 80, full: bool = False, **console: object) -> str:
    out = io.StringIO()
    print_report(Console(file=out, width=width, highlight=False, **console), look, full)  # type: ignore[arg-type]
    return out.getvalue()


def test_the_page_is_whole_and_nothing_in_it_runs(look: CorpusReport) -> None:
    text = page(look)
    markup = parsed(text)
    assert markup.open == []
    assert "script" not in markup.seen
    assert "\x1b" not in "".join(one.shown for s in look.samples for seg in s.segments for one in seg.pieces)
    assert "http" not in text.replace("http-equiv", "")


def test_the_page_holds_the_samples_and_the_figures(look: CorpusReport) -> None:
    text = "".join(parsed(page(look)).text)
    for sample in look.samples:
        for segment in sample.segments:
            assert "".join(piece.shown for piece in segment.pieces) in text
        assert f"padding × {sample.padding}" in text
    for figure in ("4,950", "2.0 %", "p50", "and 2 more", "sequence of 128"):
        assert figure in text


def test_a_clean_page_says_so(clean: CorpusReport) -> None:
    assert "Nothing looks wrong" in page(clean)
    assert parsed(page(clean)).open == []


def test_plain_text_marks_what_is_learned_and_stays_in_80_columns(look: CorpusReport) -> None:
    text = printed(look)
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.count("⟦") == text.count("⟧") > 1
    flat = text.replace("\n", "").split("→ target only")[1]
    for sample in look.samples:
        for segment in sample.segments:
            learned = "".join(p.shown for p in segment.pieces if p.learned).replace("\n", "")
            assert f"⟦{learned}" in flat.replace("⏎ ", "⏎")
    assert f"[padding x {look.samples[0].padding}]" in text


def test_colour_says_it_without_marks_and_no_color_with_them(
    look: CorpusReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    coloured = printed(look, force_terminal=True, color_system="standard")
    assert "⟦" not in coloured
    assert "\x1b[1;32m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦" in printed(look, force_terminal=True)


def test_a_long_row_is_cut_unless_all_is_wanted(clean: CorpusReport) -> None:
    ids = [*b"word " * 1200, 256]
    rows = WholeDocuments(in_memory([ids]), 8192)
    look = replace(clean, samples=samples_of(rows.take, [0], ByteTokenizer()))
    short, full = printed(look), printed(look, full=True)
    assert "tokens omitted" in short
    assert short.count("word") < 500
    assert full.replace("⟦", "").count("word") == 1200
    assert "tokens omitted" not in full


def test_nothing_to_show_is_shown_too(clean: CorpusReport) -> None:
    empty = replace(
        clean, lengths=replace(clean.lengths, values=clean.lengths.values[:0], documents=0), rows_examined=None
    )
    assert parsed(page(empty)).open == []
    assert "p50 0" in printed(empty)
