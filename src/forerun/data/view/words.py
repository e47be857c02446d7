"""The figures of a `Look` as lines of words, the same in the terminal and on the page."""

from __future__ import annotations

from forerun.data.view.findings import policy_text, share_text
from forerun.data.view.look import PERCENTILES, Look, Sample, Segment
from forerun.units import Count

LEGEND_FIRST = "The first token of a segment has nothing before it and is never a target."


def summary(look: Look) -> list[tuple[str, str]]:
    """(name, value)"""
    learned = look.learned_share
    share = "" if learned is None else f", {share_text(learned)} of them learned"
    lines = [
        ("form", form(look)),
        ("tokenizer", f"{look.tokenizer}, vocabulary {look.vocabulary:,}"),
        ("documents", f"{look.documents:,}"),
        *(("validation", str(held)) for held in look.held_out),
        ("tokens", f"{look.tokens:,}{share}"),
        ("rows", f"{look.rows:,} of {look.sequence:,} tokens, packing {look.packing}"),
        ("padding", share_text(look.padding_share)),
        ("too long", too_long(look)),
        ("epoch", epoch(look)),
        ("seed", str(look.seed)),
    ]
    if look.skipped:
        lines.append(("bad rows", f"{look.skipped:,} passed over"))
    return lines


def form(look: Look) -> str:
    """`messages (chat)`."""
    return (
        look.form.replace("messages", "messages (chat)")
        .replace("input_ids", "input_ids (tokenized before)")
        .replace("chosen/rejected", "chosen/rejected (preference pairs)")
    )


def too_long(look: Look) -> str:
    """How many documents do not fit into a row, and what becomes of them."""
    if not look.too_long:
        return f"no document is longer than {look.sequence:,}"
    several = look.too_long > 1
    return f"{look.too_long:,} document{'s' if several else ''}: {policy_text(look)}"


def epoch(look: Look) -> str:
    """`39.5 steps of 8 rows; the job's 200 are 5.06 epochs`."""
    text = f"{number(look.steps_per_epoch)} step{'' if look.steps_per_epoch == 1 else 's'} of {look.batch:,} rows"
    if look.epochs is None:
        return text
    return f"{text}; the job's {look.steps:,} are {number(look.epochs)} epoch{'' if look.epochs == 1 else 's'}"


def number(value: float) -> str:
    """`842`, `39.5`, `0.594`: three digits, and all of a number above 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percentiles(look: Look) -> list[tuple[str, int]]:
    """(name, tokens)"""
    found = [(f"p{percent}", look.lengths.percentile(percent)) for percent in PERCENTILES]
    return [*found, ("longest", look.lengths.longest)]


def sampled_text(look: Look) -> str | None:
    """Said when not every document was looked at."""
    if not look.lengths.sampled:
        return None
    return f"counted in {len(look.lengths.values):,} of {look.lengths.documents:,} documents, evenly spaced"


def segment_text(segment: Segment) -> str:
    """`segment 1 · 412 tokens, 58 learned · positions 0–411`."""
    first, last = segment.positions
    size = f"{segment.tokens:,} token{'' if segment.tokens == 1 else 's'}, {segment.learned:,} learned"
    return f"segment {segment.number} · {size} · positions {first:,}–{last:,}"


def sample_text(sample: Sample) -> str:
    """`row 17: 2,011 tokens in 5 segments, 804 learned, 37 padding`."""
    count = len(sample.segments)
    text = f"{sample.tokens:,} tokens in {count} segment{'' if count == 1 else 's'}, {sample.learned:,} learned"
    return f"row {sample.row:,}: {text}, {sample.padding:,} padding"


def short(count: int) -> str:
    """`412k`"""
    return str(Count(count))
