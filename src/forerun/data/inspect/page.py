"""A `CorpusReport` as an HTML page: the values for the template `data.html.jinja`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from forerun.data.inspect import summary_lines
from forerun.data.inspect.corpus_report import CorpusReport, SourceSummary, TokenPiece
from forerun.data.inspect.findings import findings, share_text
from forerun.data.inspect.histogram import Histogram, histogram
from forerun.data.inspect.pieces import ExcerptPart, excerpt
from forerun.pages.render import render
from forerun.pages.svg import Element, Plot, Scale, Segment, both_widths, round_top, stacked_bar
from forerun.units import Bytes, Count
from forerun.version import __version__

LABEL_WIDTH = 52  # pixels of a label below the histogram
BINS = 28
SIGNS = 24_000  # characters shown of a row: the middle of a longer row is omitted
BLANK = "\u200b"  # makes a token without letters large enough for the mouse
MARKS = re.compile("([⏎·⇥])")
SIGN = {"wrong": ("✗", "wrong"), "check": ("!", "check"), "note": ("i", "good to know")}


def page(look: CorpusReport) -> str:
    """Return the complete page."""
    mixed = any(source.share is not None or source.passes is not None for source in look.sources)
    return render(
        "data.html.jinja",
        page_title=look.title,
        look=look,
        words=summary_lines,
        scope=_scope(look),
        findings=findings(look),
        signs=SIGN,
        figures=_figures(look),
        batch=batch_chart(look),
        sources=[_source(source, mixed) for source in look.sources],
        lengths=lengths_chart(histogram(look.lengths, look.sequence, BINS), look.sequence),
        excerpt=functools.partial(excerpt, signs=SIGNS),
        border=_border,
        tokens=_tokens,
        skipped=[{"place": one.place, "reason": one.reason} for one in look.skipped_first],
        version=__version__,
    )


def _scope(look: CorpusReport) -> str:
    parts = []
    if look.lengths.sampled:
        parts.append(f"Lengths are {summary_lines.sampled_text(look)}.")
    if look.documents_examined and look.documents_examined.documents < look.documents:
        parts.append(f"{look.documents_examined.documents:,} documents were checked for mistakes.")
    return " ".join(parts)


def _figures(look: CorpusReport) -> list[tuple[str, str, str]]:
    """Return (name, value, explanation) of each figure at the top."""
    learned = look.learned_share
    kept = f"validation: {'; '.join(map(str, look.held_out))}" if look.held_out else "none for validation"
    epochs = None if look.epochs is None else summary_lines.number(look.epochs)
    job = f"the job's {look.steps:,} are {epochs} epochs" if epochs else f"batches of {look.batch:,} rows"
    return [
        ("documents", f"{look.documents:,}", kept),
        ("tokens", str(Count(look.tokens)), f"{look.tokens:,}"),
        ("with loss", "–" if learned is None else share_text(learned), "of the tokens; the rest is masked"),
        ("padding", share_text(look.padding_share), f"packing {look.packing}"),
        ("rows", f"{look.rows:,}", f"of {look.sequence:,} tokens"),
        ("steps per epoch", summary_lines.number(look.steps_per_epoch), job),
    ]


def _source(one: SourceSummary, mixed: bool) -> dict[str, object]:
    shares = {
        "share": None if one.share is None else share_text(one.share),
        "passes": None if one.passes is None else f"{one.passes:.3g}",
    }
    return {
        "source": one.name,
        "recognised": one.recognised,
        "files": f"{one.files:,}",
        "size": Bytes(one.size_bytes),
        "documents": f"{one.documents:,}",
        "tokens": f"{one.tokens:,}",
        **(shares if mixed else {}),
    }


def _border(part: ExcerptPart) -> list[str]:
    """Return the name of a segment and its figures."""
    text = summary_lines.segment_text(part.segment) if part.begins else f"end of segment {part.segment.number} · "
    return text.split(" · ", 1)


def _tokens(part: ExcerptPart) -> Iterator[tuple[str, str, list[tuple[str, bool]], bool]]:
    """Yield the CSS classes, tooltip and texts of each token, and whether it is only a target."""
    is_complete = part.pieces[-1] is part.segment.pieces[-1]
    target = part.segment.target if is_complete else None
    for piece in (*part.pieces, *((target,) if target else ())):
        css = " ".join(name for name, on in (("l", piece.learned), ("s", piece.special)) if on)
        ids = f"{'id' if len(piece.ids) == 1 else 'ids'} {' '.join(map(str, piece.ids))}"
        title = f"{ids}, position {piece.position}, {'with loss' if piece.learned else 'masked'}"
        yield css, title, _texts(piece), piece is target


def _texts(piece: TokenPiece) -> list[tuple[str, bool]]:
    """Return the parts of a token's text, and whether each is a mark such as ⏎."""
    if piece.special or not MARKS.search(piece.shown):
        return [(piece.shown or BLANK, False)]
    return [(text, n % 2 == 1) for n, text in enumerate(MARKS.split(piece.shown)) if text]


def batch_chart(look: CorpusReport) -> tuple[Element, list[tuple[str, str, str]]]:
    """Return the bar chart of the contents of a batch, and its legend: (CSS class, label, share)."""
    filled, learned = 1 - look.padding_share, look.learned_share
    parts = [("c2", "padding", look.padding_share)]
    if learned is None:
        parts.insert(0, ("c3", "tokens", filled))
    else:
        parts[:0] = [("c3", "with loss", filled * learned), ("mask", "masked", filled * (1 - learned))]
    legend = [(css, name, share_text(share)) for css, name, share in parts]
    segments = [Segment(share, css, f"{name}: {share_text(share)}") for css, name, share in parts]
    return stacked_bar(segments, 1.0, ", ".join(one.title for one in segments)), legend


def lengths_chart(found: Histogram, sequence: int) -> dict[str, Plot]:
    """Return the histogram of lengths, for wide and for narrow screens."""
    bins = found.bins
    top, total = round_top(found.most), max(1, sum(one.count for one in bins))
    label = "; ".join(f"{one.label} tokens: {one.count:,}" for one in bins if one.count)

    def draw(size: tuple[int, int]) -> Plot:
        plot = Plot(size, Scale(0, max(1, len(bins))), Scale(0, top), f"documents by length: {label}")
        ticks = (0, top / 2, top)
        plot.y_axis({tick: f"{tick:g}" if tick < 1000 else str(Count(round(tick))) for tick in ticks})
        for n, one in enumerate(bins):
            many = "document" if one.count == 1 else "documents"
            title = f"{one.label} tokens: {one.count:,} {many}, {share_text(one.count / total)}"
            plot.bar(n, n + 1, one.count, "bin over" if one.longer else "bin c0", title)
        # The label of a bin is its longest length, at its right border. The border at the sequence has a label.
        every = max(1, round(LABEL_WIDTH / (plot.x(1) - plot.x(0)) + 0.499))
        labelled = (found.cut or len(bins)) % every
        borders = {n: f"{one.high:,}" if n % every == labelled else "" for n, one in enumerate(bins, start=1)}
        name = "length in tokens, growing scale" if found.growing else "length in tokens"
        plot.x_axis(borders, name, anchor="end", grid=False)
        if found.cut is None:
            plot.text(f"no document is longer than the sequence of {sequence:,}", plot.right, 18, anchor="end")
        else:
            plot.marker(found.cut, f"sequence {sequence:,}")
        return plot

    return both_widths(draw, 260)
