"""A `CorpusReport` on a terminal: findings, sources, figures, a histogram, and rows as the model sees them.

With colour, tokens with a loss are bright, masked tokens dim, special tokens reversed or magenta. Without colour (no
terminal, or NO_COLOR), ⟦ and ⟧ enclose tokens with a loss, so the text has the same information.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.data.inspect import summary_lines as words
from forerun.data.inspect.corpus_report import CorpusReport, Sample, TokenPiece
from forerun.data.inspect.findings import Finding, findings, share_text
from forerun.data.inspect.histogram import histogram
from forerun.data.inspect.pieces import Gap, excerpt, visible
from forerun.hardware.object_storage import storage_table
from forerun.units import Bytes, Count

BINS = 14
SIGNS = 1600  # characters shown of a row, unless the complete row is requested
WIDEST = 120
MARKS = {"wrong": ("✗", "red"), "check": ("!", "yellow"), "note": ("·", "blue")}
TARGET = "→"  # before a token that is only a target
OPEN, CLOSE = "⟦", "⟧"
STYLES = {  # by learned, special
    (True, True): "bold green reverse",
    (True, False): "bold green",
    (False, True): "magenta",
    (False, False): "dim",
}
BLOCKS = " ▏▎▍▌▋▊▉"


def print_report(console: Console, look: CorpusReport, full: bool = False) -> None:
    """Print the complete report. With `full`, long rows are shown without a gap."""
    width = min(console.width, WIDEST)
    plain = console.color_system is None or console.no_color
    console.print(Text(_safe(look.title), style="bold"), width=width)
    for finding in findings(look):
        console.print()
        console.print(_finding(finding), width=width)
    console.print()
    console.print(_sources(look), width=width)
    console.print()
    console.print(_figures(look), width=width)
    if look.storage is not None:
        console.print()
        console.print(storage_table(look.storage), width=width)
    console.print()
    for line in _lengths(look, width):
        console.print(line, width=width, no_wrap=True, overflow="ellipsis", crop=True)
    if look.skipped_first:
        console.print()
        console.print(_skipped(look), width=width)
    for n, sample in enumerate(look.samples):
        console.print()
        for line in _sample(sample, width, plain, None if full else SIGNS, with_legend=n == 0):
            console.print(line, width=width, overflow="fold")


def _finding(finding: Finding) -> Table:
    sign, style = MARKS[finding.level]
    table = Table.grid(padding=(0, 1))
    table.add_column(width=5, justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(sign, style=f"bold {style}"), Text(_safe(finding.what), style=f"bold {style}"))
    table.add_row(Text("why", style="dim"), Text(_safe(finding.why)))
    table.add_row(Text("fix", style="dim"), Text(_safe(finding.fix)))
    return table


def _safe(text: str) -> str:
    """Return the text on one line and without escapes, because names and reasons come from the user's files."""
    return visible(text.strip()).replace("⏎\n", "⏎ ").replace("⇥\t", "⇥ ")


def _sources(look: CorpusReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    table.add_column("source", overflow="fold", style="bold")
    table.add_column("recognised", overflow="fold")
    mixed = any(source.share is not None or source.passes is not None for source in look.sources)
    for name in ("size", "documents", "tokens", *(("share", "passes") if mixed else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for source in look.sources:
        share = share_text(source.share) if source.share is not None else "–"
        passes = f"{source.passes:.3g}" if source.passes is not None else "–"
        table.add_row(
            Text(_safe(source.name)),
            Text(_safe(source.recognised)),
            str(Bytes(source.size_bytes)),
            f"{source.documents:,}",
            str(Count(source.tokens)),
            *((share, passes) if mixed else ()),
        )
    return table


def _figures(look: CorpusReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in words.summary(look):
        if name == "order":  # the table of requests has it
            continue
        if name != "padding":
            table.add_row(name, Text(_safe(value)))
            continue
        style = "red" if look.padding_share > 0.3 else "yellow" if look.padding_share > 0.1 else "green"
        filled = _bar(1 - look.padding_share, 24).ljust(24)
        table.add_row(name, Text.assemble((f"{filled}▕ ", style), value))
    return table


def _skipped(look: CorpusReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    table.add_row(Text(f"Bad rows: {look.skipped:,}", style="bold"), "")
    for one in look.skipped_first:
        table.add_row(Text(_safe(one.place)), Text(_safe(one.reason)))
    if look.skipped > len(look.skipped_first):
        table.add_row(Text(f"and {look.skipped - len(look.skipped_first):,} more", style="dim"), "")
    return table


def _lengths(look: CorpusReport, width: int) -> Iterable[Text]:
    found = histogram(look.lengths, look.sequence, BINS)
    sampled = words.sampled_text(look)
    yield Text.assemble(("Documents by length in tokens", "bold"), (f"  {sampled}" if sampled else "", "dim"))
    names = max((len(one.label) for one in found.bins), default=0)
    counts = max((len(f"{one.count:,}") for one in found.bins), default=0)
    room = max(8, width - names - counts - 6)
    for n, one in enumerate(found.bins):
        if n == found.cut:
            yield _rule(f"sequence {look.sequence:,}: below this line documents are longer", width, "red")
        bar = _bar(one.count / max(1, found.most), room) or ("▏" if one.count else "")
        style = "red" if one.longer else "cyan"
        yield Text.assemble((f"{one.label:>{names}} │", "dim"), (bar, style), f" {one.count:,}" if one.count else "")
    if found.cut is None and found.bins:
        yield _rule(f"sequence {look.sequence:,}: no document is longer", width, "dim")
    figures = [(f"{name} ", f"{value:,}   ") for name, value in words.percentiles(look)]
    yield Text.assemble(*(part for name, value in figures for part in ((name, "dim"), value)))


def _bar(share: float, room: int) -> str:
    eighths = round(share * room * 8)
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()


def _rule(words: str, width: int, style: str) -> Text:
    return Text(f"── {words} ".ljust(width, "─")[:width], style=style)


def _sample(sample: Sample, width: int, plain: bool, signs: int | None, with_legend: bool) -> Iterable[Text]:
    yield Text(words.sample_text(sample), style="bold")
    if with_legend:
        yield _legend(plain)
    for part in excerpt(sample, signs):
        if isinstance(part, Gap):
            yield Text(f"[… {part.text()}; --full shows them]", style="yellow")
            continue
        if part.begins:
            yield _rule(words.segment_text(part.segment), width, "blue")
        else:
            yield _rule(f"end of segment {part.segment.number}", width, "blue")
        ends = part.pieces[-1] is part.segment.pieces[-1]
        yield _body(part.pieces, plain, part.segment.target if ends else None)
    if sample.padding:
        yield Text(f"[padding x {sample.padding:,}]", style="yellow")


def _legend(plain: bool) -> Text:
    if plain:
        return Text(f"{OPEN}with loss{CLOSE}, the rest is masked; ⏎ line end; · blank at an end; → target only")
    return Text.assemble(
        ("with loss", "bold green"),
        "  ",
        ("masked", "dim"),
        "  ",
        ("<special>", "magenta"),
        ("  ⏎ line end  · blank at an end  → target only", "dim"),
    )


def _body(pieces: Sequence[TokenPiece], plain: bool, target: TokenPiece | None) -> Text:
    text = Text()
    inside = False
    for piece in (*pieces, *((target,) if target else ())):
        if piece is target:
            text.append(TARGET, style="yellow")
        if plain and piece.learned != inside:
            text.append(OPEN if piece.learned else CLOSE)
            inside = piece.learned
        text.append(piece.shown, style=STYLES[piece.learned, piece.special])
    if inside:
        text.append(CLOSE)
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text
