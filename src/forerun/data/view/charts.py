"""The drawings of the page as inline SVG. Colours are CSS variables, so that they follow light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from forerun.data.view.findings import share_text
from forerun.data.view.histogram import Bin, Histogram
from forerun.units import Count

WIDE, NARROW = (1000, 260), (360, 230)
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 34, 46
LABEL_WIDTH = 52


@dataclass(frozen=True)
class Slice:
    share: float  # of the bar, 0 .. 1
    css: str  # its class
    says: str


def slices_bar(slices: Iterable[Slice], says: str) -> str:
    """One bar from side to side."""
    drawn, begin = [], 0.0
    for one in slices:
        if one.share > 0:
            place = f'x="{100 * begin:.2f}%" width="{100 * one.share:.2f}%" y="0" height="22"'
            drawn.append(f'<rect class="{one.css}" {place}><title>{escape(one.says)}</title></rect>')
        begin += one.share
    return f'<svg class="share" role="img" aria-label="{escape(says)}">{"".join(drawn)}</svg>'


def lengths_chart(found: Histogram, sequence: int) -> str:
    """The histogram, twice: for wide and for narrow screens, as text must not shrink with the picture."""
    return "".join(
        f'<div class="{css}">{_Chart(found, sequence, size).drawing()}</div>'
        for css, size in (("wide", WIDE), ("narrow", NARROW))
    )


class _Chart:
    def __init__(self, found: Histogram, sequence: int, size: tuple[int, int]) -> None:
        self.found, self.sequence = found, sequence
        self.width, self.height = size
        self.top = nice_top(found.most)
        self.step = (self.width - LEFT - RIGHT) / max(1, len(found.bins))
        self.total = sum(one.count for one in found.bins)

    def drawing(self) -> str:
        parts = [*self._grid(), *self._bars(), *self._labels(), *self._line()]
        says = "; ".join(f"{one.label} tokens: {one.count:,}" for one in self.found.bins if one.count)
        box = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg {box} role="img" aria-label="documents by length: {escape(says)}">{"".join(parts)}</svg>'

    def _y(self, count: float) -> float:
        return self.height - BOTTOM - count / self.top * (self.height - TOP - BOTTOM)

    def _grid(self) -> Iterable[str]:
        for tick in (0, self.top / 2, self.top):
            y, text = self._y(tick), f"{tick:g}" if tick < 1000 else str(Count(round(tick)))
            yield f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'

    def _bars(self) -> Iterable[str]:
        for n, one in enumerate(self.found.bins):
            x, y = LEFT + n * self.step, self._y(one.count)
            if one.count:
                y = min(y, self._y(0) - 2)
            size = f'width="{max(1, self.step - 2):.1f}" height="{self._y(0) - y:.1f}"'
            yield (
                f'<rect class="{"bin longer" if one.longer else "bin"}" x="{x + 1:.1f}" y="{y:.1f}" {size}>'
                f"<title>{escape(self._says(one))}</title></rect>"
            )

    def _says(self, one: Bin) -> str:
        many = "document" if one.count == 1 else "documents"
        return f"{one.label} tokens: {one.count:,} {many}, {share_text(one.count / max(1, self.total))}"

    def _labels(self) -> Iterable[str]:
        """The longest length of a bin stands at its right border."""
        y = self.height - BOTTOM + 18
        every = max(1, round(LABEL_WIDTH / self.step + 0.499))
        anchor = (self.found.cut or len(self.found.bins)) % every
        for n, one in enumerate(self.found.bins, start=1):
            x = LEFT + n * self.step
            yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 18}" y2="{y - 13}"/>'
            if n % every == anchor:
                yield f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="end">{one.high:,}</text>'
        says = "length in tokens" + (", growing scale" if self.found.growing else "")
        yield f'<text class="tick" x="{self.width - RIGHT}" y="{y + 20}" text-anchor="end">{says}</text>'

    def _line(self) -> Iterable[str]:
        cut = self.found.cut
        if cut is None:
            text = f"no document is longer than the sequence of {self.sequence:,}"
            yield f'<text class="tick" x="{self.width - RIGHT}" y="18" text-anchor="end">{text}</text>'
            return
        x = LEFT + cut * self.step
        yield f'<line class="cut" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{self.height - BOTTOM}"/>'
        left = x > self.width / 2
        place = f'x="{x - 8 if left else x + 8:.1f}" y="18" text-anchor="{"end" if left else "start"}"'
        yield f'<text class="cut-name" {place}>sequence {self.sequence:,}</text>'


def nice_top(most: int) -> int:
    """The end of an axis: a round number, at least `most`, whose half is round too."""
    decade = 1
    while decade * 100 < most:
        decade *= 10
    steps = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 30, 40, 50, 60, 80, 100)
    return next(step * decade for step in steps if step * decade >= most)
