"""Figures against plain counting."""

from __future__ import annotations

import io
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from forerun.data.documents import in_memory
from forerun.data.inspect.corpus_report import CorpusReport, Lengths, SkippedRows
from forerun.data.inspect.histogram import histogram
from forerun.data.inspect.open_corpus import examine_documents, examine_rows, lengths_of, samples_of
from forerun.data.inspect.page import page
from forerun.data.inspect.pieces import ExcerptPart, Gap, excerpt
from forerun.data.inspect.terminal import print_report
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.whole_documents import WholeDocuments
from forerun.data.tokenizer import ByteTokenizer, Tokenizer
from forerun.pages.svg import round_top

EOS = 256


def drawn(count: int, longest: int, seed: int = 3) -> tuple[list[list[int]], list[list[bool]]]:
    random = np.random.default_rng(seed)
    sizes = random.integers(2, longest, count)
    documents = [[*random.integers(97, 122, size - 1).tolist(), EOS] for size in sizes]
    masks = [(random.random(size) < 0.4).tolist() for size in sizes]
    return documents, masks


def test_lengths_are_counted_and_percentiles_are_lengths() -> None:
    documents, _ = drawn(200, 90)
    found = lengths_of(in_memory(documents))
    sizes = sorted(len(document) for document in documents)
    assert sorted(found.values.tolist()) == sizes
    assert not found.sampled
    assert [found.percentile(p) for p in (50, 90, 99)] == [sizes[99], sizes[179], sizes[197]]
    assert found.longest == sizes[-1]
    assert found.longer_share(63) == sum(size > 64 for size in sizes) / 200


def test_lengths_of_many_documents_are_sampled_evenly_and_say_so() -> None:
    sizes = np.arange(100_000) // 1000 + 2  # grows from front to back: a sample from one place would show
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    class Index:
        asked = 0

        def __len__(self) -> int:
            return len(sizes)

        def begins(self, documents: object) -> np.ndarray:
            wanted = np.asarray(documents)
            self.asked += wanted.size
            return offsets[wanted]

    index = Index()
    found = lengths_of(index, at_most=8192)  # type: ignore[arg-type]
    assert found.sampled
    assert (found.documents, len(found.values)) == (100_000, 8192)
    assert index.asked < 9000
    assert abs(found.values.mean() - sizes.mean()) < 2
    assert found.percentile(50) == pytest.approx(52, abs=3)


@pytest.mark.parametrize("packing", ["whole", "concatenate"])
def test_samples_are_the_rows_token_by_token(packing: str) -> None:
    documents, masks = drawn(40, 30)
    held = in_memory(documents, masks)
    rows = WholeDocuments(held, 48) if packing == "whole" else Concatenated(held, 48)
    index = list(range(len(rows)))
    arrays = rows.take(index)
    samples = samples_of(rows.take, index, ByteTokenizer())
    assert sum(sample.learned for sample in samples) == int(arrays["weights"].sum())
    for n, sample in enumerate(samples):
        assert sample.row == n
        real = arrays["segments"][n] > 0
        flat = [(s.number, p, piece) for s in sample.segments for piece in s.pieces for p in piece.ids]
        assert [token for _, token, _ in flat] == arrays["tokens"][n][real].tolist()
        assert [number for number, _, _ in flat] == arrays["segments"][n][real].tolist()
        assert [piece.position for _, _, piece in flat] == arrays["positions"][n][real].tolist()
        assert sample.padding == int((~real).sum())
        for at in np.flatnonzero(real).tolist():  # the token behind a weighted position is learned, and no other
            last = at == 47 or arrays["segments"][n][at + 1] != arrays["segments"][n][at]
            weighted = bool(arrays["weights"][n][at])
            if not last:
                assert flat[at + 1][2].learned == weighted
            else:
                target = sample.segments[arrays["segments"][n][at] - 1].target
                assert (target is not None) == weighted
                assert target is None or target.ids == (arrays["targets"][n][at],)


def test_rows_are_counted() -> None:
    documents, masks = drawn(60, 30)
    masks[:30] = [[False] * len(mask) for mask in masks[:30]]
    rows = Concatenated(in_memory(documents, masks), 32)
    found = examine_rows(rows.take, len(rows))
    arrays = rows.take(np.arange(len(rows)))
    assert found.rows == len(rows)
    assert found.positions == len(rows) * 32
    assert found.padding == int((arrays["segments"] == 0).sum())
    assert found.learned == int((arrays["weights"] > 0).sum())
    assert found.unlearned_rows == sum(not row.any() for row in arrays["weights"]) > 0
    assert examine_rows(rows.take, len(rows), at_most=7).rows == 7


def test_documents_are_examined(byte_level: Tokenizer) -> None:
    end, start = byte_level.eos, byte_level.encode("<s>")[0]
    text = byte_level.encode("the fox slept").tolist()
    spelled = [token for part in ("<|im", "_end|>") for token in byte_level.encode(part).tolist()]
    documents = [[*text, end], [*text, end], [start, start, *text, end], text[:3], [*spelled, end], [*text, end]]
    masks = [[True] * len(document) for document in documents]
    masks[3] = [False] * 3
    found = examine_documents(in_memory(documents, masks), byte_level)
    assert (found.documents, found.tokens) == (6, sum(map(len, documents)))
    assert (found.unlearned, found.endless) == (1, 1)
    assert (found.doubled_start, found.start) == (1, "<s>")
    assert (found.repeated, found.most_often) == (2, (3, "the fox slept"))
    assert (found.spelled_out, found.spelled) == (1, "<|im_end|>")


def test_a_line_end_behind_the_end_of_the_answer_is_no_missing_end(byte_level: Tokenizer) -> None:
    chat = byte_level.encode("<|im_start|>user\nfox<|im_end|>\n").tolist()
    learned = [byte_level.decode([token]) != "\n" for token in chat]
    cut, nothing = chat[:-2], [False] * (len(chat) - 2)
    nothing[-1] = True
    assert examine_documents(in_memory([chat], [learned]), byte_level).endless == 0
    assert examine_documents(in_memory([chat]), byte_level).endless == 0
    assert examine_documents(in_memory([cut], [nothing]), byte_level).endless == 1


@pytest.mark.parametrize("longest", [3, 20, 70, 500, 40_000])
@pytest.mark.parametrize("sequence", [8, 64, 2048])
def test_bins_hold_every_length_once_and_end_where_a_row_does(longest: int, sequence: int) -> None:
    values = np.random.default_rng(1).integers(1, longest + 1, 500)
    values[0] = longest
    for most in (14, 28):
        found = histogram(Lengths(values, 500), sequence, most)
        assert len(found.bins) <= most + 1
        for one in found.bins:
            assert one.count == int(((values >= one.low) & (values <= one.high)).sum())
        assert sum(one.count for one in found.bins) == 500
        longer = sum(one.count for one in found.bins if one.longer)
        assert longer == int((values > sequence + 1).sum())
        assert (found.cut is not None) == (longest > sequence + 1)


def test_the_axis_ends_above_the_longest_bar_and_not_far_above() -> None:
    for most in range(1, 5000):
        assert most <= round_top(most) <= 2 * most


def test_a_long_row_keeps_its_ends_and_counts_the_rest() -> None:
    documents, masks = drawn(400, 30)
    rows = Concatenated(in_memory(documents, masks), 4096)
    (sample,) = samples_of(rows.take, [0], ByteTokenizer())
    assert sum(isinstance(part, Gap) for part in excerpt(sample, None)) == 0
    parts = excerpt(sample, 1600)
    (gap,) = [part for part in parts if isinstance(part, Gap)]
    shown = [piece for part in parts if isinstance(part, ExcerptPart) for piece in part.pieces]
    assert gap.tokens + sum(len(piece.ids) for piece in shown) == sample.tokens
    targets = sum(segment.target is not None for segment in sample.segments)
    assert gap.learned + sum(piece.learned for piece in shown) == sample.learned - targets
    numbers = {part.segment.number for part in parts if isinstance(part, ExcerptPart)}
    assert gap.segments == len(sample.segments) - len(numbers)
    assert shown[0] is sample.segments[0].pieces[0]
    assert shown[-1] is sample.segments[-1].pieces[-1]


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
