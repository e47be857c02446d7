"""Charts of the data page: the contents of a batch, and documents by length."""

from __future__ import annotations

from forerun.data.inspect.corpus_report import CorpusReport
from forerun.data.inspect.findings import share_text
from forerun.data.inspect.histogram import Histogram
from forerun.pages.svg import Element, Plot, Scale, Segment, both_widths, round_top, stacked_bar
from forerun.units import Count

LABEL_WIDTH = 52  # pixels of a label below the histogram


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
