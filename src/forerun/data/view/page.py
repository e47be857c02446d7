"""A `Look` as one HTML page that needs nothing else: no network, no script; light and dark, phone and desk.

Whatever comes from the data or the job is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from forerun import __version__
from forerun.data.view import words
from forerun.data.view.charts import Slice, lengths_chart, slices_bar
from forerun.data.view.excerpt import Gap, excerpt
from forerun.data.view.findings import Finding, findings, share_text
from forerun.data.view.histogram import histogram
from forerun.data.view.look import Look, Piece, Sample, Segment
from forerun.units import Bytes

BINS = 28
SIGNS = 24_000  # of a row: beyond it, its middle is left out
BLANK = "\u200b"  # gives a token without letters something to point at
SIGN = {"wrong": "✗", "check": "!", "note": "i"}
NAMES = {"wrong": "wrong", "check": "check", "note": "good to know"}


def page(look: Look) -> str:
    """The whole page."""
    found = findings(look)
    body = [
        "<header>",
        f"<h1>{escape(look.title)}</h1>",
        f'<p class="dim">What the model will see, as <code>forerun data</code> found it. {escape(_scope(look))}</p>',
        "</header>",
        "<main>",
        *_findings(found),
        *_cards(look),
        *_filling(look),
        *_sources(look),
        *_lengths(look),
        *_samples(look.samples),
        *_skipped(look),
        "</main>",
        f"<footer>forerun {escape(__version__)}, seed {look.seed}.</footer>",
    ]
    return _frame(look.title, "\n".join(body))


def _frame(title: str, body: str) -> str:
    style = resources.files("forerun.data.view").joinpath("page.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _scope(look: Look) -> str:
    parts = []
    if look.lengths.sampled:
        parts.append(f"Lengths are {words.sampled_text(look)}.")
    if look.documents_examined and look.documents_examined.documents < look.documents:
        parts.append(f"{look.documents_examined.documents:,} documents were read for mistakes.")
    return " ".join(parts)


def _findings(found: Sequence[Finding]) -> Iterable[str]:
    if not found:
        yield '<p class="fine"><b aria-hidden="true">✓</b> Nothing looks wrong.</p>'
        return
    yield '<ul class="findings" aria-label="findings">'
    for one in found:
        yield (
            f'<li class="{one.level}"><b class="sign" aria-hidden="true">{SIGN[one.level]}</b>'
            f'<div><span class="unseen">{NAMES[one.level]}: </span><strong>{escape(one.what)}</strong>'
            f"<p>{escape(one.why)}</p><p><em>fix</em> {escape(one.fix)}</p></div></li>"
        )
    yield "</ul>"


def _cards(look: Look) -> Iterable[str]:
    learned = look.learned_share
    kept = f"validation: {'; '.join(map(str, look.held_out))}" if look.held_out else "none for validation"
    many = "" if look.epochs is None else words.number(look.epochs)
    job = f"the job's {look.steps:,} are {many} epochs" if many else f"batches of {look.batch:,} rows"
    figures = [
        ("documents", f"{look.documents:,}", kept),
        ("tokens", words.short(look.tokens), f"{look.tokens:,}"),
        ("learned", "–" if learned is None else share_text(learned), "of the tokens; the rest is masked"),
        ("padding", share_text(look.padding_share), f"packing {look.packing}"),
        ("rows", f"{look.rows:,}", f"of {look.sequence:,} tokens"),
        ("steps per epoch", words.number(look.steps_per_epoch), job),
    ]
    yield '<dl class="figures">'
    for name, value, more in figures:
        yield f"<div><dt>{name}</dt><dd>{value}</dd><dd class='more'>{escape(more)}</dd></div>"
    yield "</dl>"


def _sources(look: Look) -> Iterable[str]:
    mixed = any(source.share is not None or source.passes is not None for source in look.sources)
    heads = ["source", "recognised", "files", "size", "documents", "tokens", *(("share", "passes") if mixed else ())]
    yield "<h2>What was found</h2>"
    yield '<div class="scroll" tabindex="0" role="region" aria-label="sources"><table class="cards"><thead><tr>'
    yield "".join(f"<th{'' if n < 2 else ' class=num'}>{head}</th>" for n, head in enumerate(heads))
    yield "</tr></thead><tbody>"
    for one in look.sources:
        cells = [
            one.recognised,
            f"{one.files:,}",
            str(Bytes(one.size_bytes)),
            f"{one.documents:,}",
            f"{one.tokens:,}",
        ]
        if mixed:
            cells.append("–" if one.share is None else share_text(one.share))
            cells.append("–" if one.passes is None else f"{one.passes:.3g}")
        row = "".join(
            f'<td{"" if n == 0 else " class=num"} data-label="{head}">{escape(cell)}</td>'
            for n, (head, cell) in enumerate(zip(heads[1:], cells, strict=True))
        )
        yield f"<tr><td><b>{escape(one.name)}</b></td>{row}</tr>"
    yield "</tbody></table></div>"
    form = f"Read as <b>{escape(words.form(look))}</b>"
    yield f"<p class=dim>{form}, with {escape(look.tokenizer)}, a vocabulary of {look.vocabulary:,}.</p>"


def _lengths(look: Look) -> Iterable[str]:
    yield "<h2>Documents by length</h2>"
    marks = "".join(f"<li><span>{name}</span> <b>{value:,}</b></li>" for name, value in words.percentiles(look))
    yield f'<ul class="marks">{marks}</ul>'
    yield f"<figure>{lengths_chart(histogram(look.lengths, look.sequence, BINS), look.sequence)}</figure>"
    yield f"<p class=dim>Too long for a row: {escape(words.too_long(look))}.</p>"


def _filling(look: Look) -> Iterable[str]:
    yield "<h2>What fills a batch</h2>"
    padding = look.padding_share
    learned = look.learned_share
    parts = [("padding", padding, "pad")]
    if learned is None:
        parts.insert(0, ("tokens", 1 - padding, "learn"))
    else:
        parts[:0] = [("learned", (1 - padding) * learned, "learn"), ("masked", (1 - padding) * (1 - learned), "mask")]
    says = ", ".join(f"{name} {share_text(share)}" for name, share, _ in parts)
    yield slices_bar([Slice(share, css, f"{name}: {share_text(share)}") for name, share, css in parts], says)
    keys = "".join(f'<li><i class="{css}"></i>{name} <b>{share_text(share)}</b></li>' for name, share, css in parts)
    yield f'<ul class="legend">{keys}</ul>'


def _skipped(look: Look) -> Iterable[str]:
    if not look.skipped:
        return
    yield f"<h2>Bad rows passed over: {look.skipped:,}</h2>"
    yield '<div class="scroll" tabindex="0" role="region" aria-label="bad rows"><table class="bad-rows"><thead>'
    yield "<tr><th>place</th><th>reason</th></tr></thead><tbody>"
    for one in look.skipped_first:
        yield f"<tr><td><code>{escape(one.place)}</code></td><td>{escape(one.reason)}</td></tr>"
    yield "</tbody></table></div>"
    if look.skipped > len(look.skipped_first):
        yield f"<p class=dim>and {look.skipped - len(look.skipped_first):,} more.</p>"


def _samples(samples: Sequence[Sample]) -> Iterable[str]:
    if not samples:
        return
    yield "<h2>Rows as the model sees them</h2>"
    yield (
        '<p class="key"><span class="l">learned</span> <span>masked</span> <b class="s">special token</b> '
        '<span class="t">→</span> only a target &nbsp; <span class="w">⏎</span> line end &nbsp; '
        '<span class="w">·</span> blank at an end. Point at a token for its id and position. '
        f"{words.LEGEND_FIRST}</p>"
    )
    for n, sample in enumerate(samples):
        yield f'<details class="row"{" open" if n < 3 else ""}><summary>{escape(words.sample_text(sample))}</summary>'
        for part in excerpt(sample, SIGNS):
            if isinstance(part, Gap):
                yield f'<p class="gap">… {escape(part.text())} …</p>'
                continue
            yield _border(part.segment, part.begins)
            whole = part.pieces[-1] is part.segment.pieces[-1]
            target = part.segment.target if whole else None
            yield f'<div class="text">{"".join(map(_piece, part.pieces))}{_target(target)}</div>'
        if sample.padding:
            yield f'<p class="padding">padding × {sample.padding:,}</p>'
        yield "</details>"


def _border(segment: Segment, begins: bool) -> str:
    text = words.segment_text(segment) if begins else f"segment {segment.number}, its end"
    name, _, more = text.partition(" · ")
    return f'<h3 class="border"><b>{escape(name)}</b> <span>{escape(more)}</span></h3>'


def _target(piece: Piece | None) -> str:
    return f'<span class="t">→</span>{_piece(piece)}' if piece else ""


def _piece(piece: Piece) -> str:
    says = f"{'id' if len(piece.ids) == 1 else 'ids'} {' '.join(map(str, piece.ids))}, position {piece.position}"
    says += ", learned" if piece.learned else ", masked"
    shown = escape(piece.shown) or BLANK
    if not piece.special:
        for sign in ("⏎", "·", "⇥"):
            shown = shown.replace(sign, f'<span class="w">{sign}</span>') if sign in piece.shown else shown
    css = " ".join(name for name, on in (("l", piece.learned), ("s", piece.special)) if on)
    tag = "b" if piece.special else "span"
    return f'<{tag}{f" class={chr(34)}{css}{chr(34)}" if css else ""} title="{says}">{shown}</{tag}>'
