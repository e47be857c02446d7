"""The figures of a `CorpusReport` as lines of text, the same in the terminal and on the page."""

from __future__ import annotations

from forerun.data.inspect.corpus_report import PERCENTILES, CorpusReport, RowSegment, Sample
from forerun.data.inspect.findings import policy_text, share_text

LEGEND_FIRST = "The first token of a segment has nothing before it and is never a target."


def summary(look: CorpusReport) -> list[tuple[str, str]]:
    """Return the name and the value of each figure."""
    learned = look.learned_share
    share = "" if learned is None else f", {share_text(learned)} of them with loss"
    lines = [
        ("form", form(look)),
        *(("rendered", text) for text in look.rendering),
        *(
            [("not used", f"column{'s' if len(look.unused) > 1 else ''} {', '.join(look.unused)}")]
            if look.unused
            else []
        ),
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
    if look.storage is not None:
        lines.append(("order", look.storage.recommendation))
    if look.skipped:
        lines.append(("bad rows", f"{look.skipped:,} skipped"))
    return lines


def form(look: CorpusReport) -> str:
    """Return the form of the rows with an explanation, such as `messages (chat)`."""
    return (
        look.form.replace("messages", "messages (chat)")
        .replace("input_ids", "input_ids (already tokenized)")
        .replace("chosen/rejected", "chosen/rejected (preference pairs)")
        .replace("alpaca", "alpaca (instruction, input, output)")
    )


def too_long(look: CorpusReport) -> str:
    """Return how many documents do not fit into a row, and what happens to them."""
    if not look.too_long:
        return f"no document is longer than {look.sequence:,}"
    several = look.too_long > 1
    return f"{look.too_long:,} document{'s' if several else ''}: {policy_text(look)}"


def epoch(look: CorpusReport) -> str:
    """Return the length of an epoch, such as `39.5 steps of 8 rows; the job's 200 are 5.06 epochs`."""
    text = f"{number(look.steps_per_epoch)} step{'' if look.steps_per_epoch == 1 else 's'} of {look.batch:,} rows"
    if look.epochs is None:
        return text
    return f"{text}; the job's {look.steps:,} are {number(look.epochs)} epoch{'' if look.epochs == 1 else 's'}"


def number(value: float) -> str:
    """Return a number with three digits, or all digits before the point if it is larger: `0.594`, `39.5`, `8,421`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percentiles(look: CorpusReport) -> list[tuple[str, int]]:
    """Return (name, length in tokens) of the percentiles and of the longest document."""
    found = [(f"p{percent}", look.lengths.percentile(percent)) for percent in PERCENTILES]
    return [*found, ("longest", look.lengths.longest)]


def sampled_text(look: CorpusReport) -> str | None:
    """Return a note that the lengths are those of a sample, or None if all documents were measured."""
    if not look.lengths.sampled:
        return None
    return f"counted in {len(look.lengths.values):,} of {look.lengths.documents:,} documents, evenly spaced"


def segment_text(segment: RowSegment) -> str:
    """Return the border of a segment, such as `segment 1 · 412 tokens, 58 with loss · positions 0–411`."""
    first, last = segment.positions
    size = f"{segment.tokens:,} token{'' if segment.tokens == 1 else 's'}, {segment.learned:,} with loss"
    return f"segment {segment.number} · {size} · positions {first:,}–{last:,}"


def sample_text(sample: Sample) -> str:
    """Return the title of a row, such as `row 17: 2,011 tokens in 5 segments, 804 with loss, 37 padding`."""
    count = len(sample.segments)
    text = f"{sample.tokens:,} tokens in {count} segment{'' if count == 1 else 's'}, {sample.learned:,} with loss"
    return f"row {sample.row:,}: {text}, {sample.padding:,} padding"
