"""What is probably wrong with the data, told as what, why and fix. Silent on data that is in order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from forerun.data.view.look import ExaminedDocuments, Look

PADDING, MUCH_PADDING = 0.10, 0.30
TOO_LONG, TOO_LONG_LOST, TOO_LONG_CUT = 0.01, 0.001, 0.25
UNLEARNED_ROWS = 0.01
LITTLE_LEARNED = 0.02
REPEATED, REPEATED_TIMES = 0.02, 3
UNKNOWN = 0.001
MANY_PASSES, MANY_EPOCHS = 4.0, 10.0
MUCH_LONGER = 8
ROUND = 128  # sequences are proposed in multiples of this
POLICY = {
    "split": "split into parts, each a segment of its own",
    "keep_start": "cut off behind the sequence: their ends are never seen",
    "keep_end": "cut off in front: their beginnings are never seen",
    "shorten": "given less of their prompt, or left out where the answers alone are too long",
    "drop": "left out of the training",
    "stop": "a reason to stop: the run will not start",
}
LEVELS = ("wrong", "check", "note")


@dataclass(frozen=True)
class Finding:
    """`wrong` should not be trained on, `check` deserves a look, `note` is good to know."""

    level: Literal["wrong", "check", "note"]
    what: str
    why: str
    fix: str


def findings(look: Look) -> list[Finding]:
    """The worst first."""
    found = [*_learning(look), *_rows(look), *_lengths(look), *_amounts(look)]
    if look.documents_examined:
        found += _documents(look.documents_examined, look.form)
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def policy_text(look: Look) -> str:
    """What becomes of documents longer than the sequence."""
    if not look.whole:
        return "cut at the row's end and continued in the next row: no token is lost"
    return POLICY.get(look.too_long_policy, look.too_long_policy)


def share_text(share: float) -> str:
    """`41 %`, `0.3 %`; never 0 for something, never 100 for less than all."""
    percent = 100 * share
    if percent in (0, 100):
        return f"{percent:.0f} %"
    if percent < 0.05:
        return "< 0.1 %"
    if percent >= 99.95:
        return "> 99.9 %"
    return f"{percent:.1f} %" if percent < 10 or percent > 99 else f"{percent:.0f} %"


def _learning(look: Look) -> Iterator[Finding]:
    rows, documents = look.rows_examined, look.documents_examined
    chat = "messages" in look.form
    template = "look at the samples: does the template mark the answers? data.chat_template=chatml is one that does"
    fix = f"{template}; data.loss_on=all learns everything" if chat else "data.loss_on=all learns every token"
    name = "conversations" if chat else "documents"
    if rows and rows.rows and not rows.learned:
        why = f"in {rows.rows:,} rows looked at, no position has a weight: the loss would be 0 and teach nothing"
        yield Finding("wrong", "nothing is learned at all", why, fix)
        return
    if documents and documents.unlearned:
        share = documents.unlearned / documents.documents
        what = f"{documents.unlearned:,} of {documents.documents:,} {name} have no learned token"
        why = "their loss is masked from end to end: an answer is missing, empty, or not recognised"
        yield Finding("wrong" if share > 0.5 else "check", what, why, fix)
    if rows and rows.unlearned_rows > UNLEARNED_ROWS * rows.rows:
        share = rows.unlearned_rows / rows.rows
        what = f"nothing is learned in {share_text(share)} of the rows"
        why = "each costs a full step's share and gives no gradient; a long prompt without its answer does that"
        yield Finding("check", what, why, "a longer sequence, or data.too_long=drop")
    learned = look.learned_share
    if learned is not None and 0 < learned < LITTLE_LEARNED:
        what = f"only {share_text(learned)} of the tokens are learned"
        yield Finding("check", what, "all others are masked", "expected? else data.loss_on=all, or another template")


def _rows(look: Look) -> Iterator[Finding]:
    if look.rows < look.batch:
        what = f"{look.rows:,} rows do not fill one batch of {look.batch:,}"
        why = f"a step reads every row at most once, and these are {look.steps_per_epoch:.3g} of a step"
        yield Finding("wrong", what, why, f"more data, or batch={max(1, look.rows)} at most")
    elif look.epochs and look.epochs > MANY_EPOCHS:
        what = f"the job sees every row about {look.epochs:,.0f} times"
        why = f"{look.steps:,} steps, and an epoch has {look.steps_per_epoch:,.4g}"
        yield Finding("check", what, why, f"more data, or steps={math.ceil(2 * look.steps_per_epoch)} for two epochs")
    if look.padding_share > PADDING:
        what = f"{share_text(look.padding_share)} of every batch is padding"
        level: Literal["wrong", "check"] = "wrong" if look.padding_share > MUCH_PADDING else "check"
        if look.whole:
            why = "documents stay whole, and they do not fill rows of this length together"
            fix = f"data.packing=concatenate, or {_better_sequence(look)}"
        else:
            why = f"{look.tokens:,} tokens are {look.rows:,} rows of {look.sequence:,}: the last one is hardly begun"
            fix = "more data, or a shorter sequence"
        yield Finding(level, what, why, fix)


def _better_sequence(look: Look) -> str:
    rounded = -(-look.lengths.percentile(99) // ROUND) * ROUND
    if rounded < look.sequence:
        return f"sequence={rounded}, which still holds 99 % of the documents"
    return f"a sequence of several documents, such as {2 * look.sequence}"


def _longer_sequence(look: Look) -> str:
    """What would hold nearly all documents, or at least most of them."""
    for percent in (99, 90):
        rounded = -(-look.lengths.percentile(percent) // ROUND) * ROUND
        if look.sequence < rounded <= MUCH_LONGER * look.sequence:
            return f"sequence={rounded} holds {percent} % of them; forerun plan says what it costs"
    return f"a longer sequence: the longest document has {look.lengths.longest:,} tokens"


def _lengths(look: Look) -> Iterator[Finding]:
    whole = look.whole
    share = look.lengths.longer_share(look.sequence)
    if look.too_long and look.documents:
        share = max(share, look.too_long / look.documents)
    lost = whole and look.too_long_policy not in ("split",)
    if share <= (TOO_LONG_LOST if lost else TOO_LONG if whole else TOO_LONG_CUT):
        return
    what = f"{share_text(share)} of the documents are longer than the sequence of {look.sequence:,}"
    fix = _longer_sequence(look)
    if not whole:
        yield Finding("note", what, f"they are {policy_text(look)}", f"nothing, if that is meant; {fix}")
        return
    bad = look.too_long_policy == "stop" or (lost and share > 0.1)
    more = "; data.too_long=split loses nothing" if lost and "pairs" not in look.packing else ""
    yield Finding("wrong" if bad else "check", what, f"they are {policy_text(look)}", fix + more)


def _amounts(look: Look) -> Iterator[Finding]:
    if look.skipped:
        first = look.skipped_first[0] if look.skipped_first else None
        why = f"the first: {first.place}: {first.reason}" if first else "data.bad_rows allows it"
        share = look.skipped / max(1, look.skipped + look.documents)
        what = f"{look.skipped:,} bad row{'s were' if look.skipped > 1 else ' was'} passed over ({share_text(share)})"
        yield Finding(
            "check" if share > 0.01 else "note", what, why, "mend the rows, or leave it: the skip is recorded"
        )
    for source in look.sources:
        if source.passes is not None and source.passes > MANY_PASSES:
            what = f"{source.name}: every document {source.passes:.1f} times an epoch"
            why = f"{source.documents:,} documents are to fill {share_text(source.share or 0)} of the rows"
            yield Finding("check", what, why, f"a smaller data.mixture.{source.name}.weight, or more of it")


def _documents(seen: ExaminedDocuments, form: str) -> Iterator[Finding]:
    many = f"of the {seen.documents:,} documents looked at"
    if seen.doubled_start:
        whole = seen.doubled_start == seen.documents
        what = (
            f"{'every document begins' if whole else f'{seen.doubled_start:,} documents begin'} with two {seen.start}"
        )
        why = f"{seen.doubled_start:,} {many}: the template writes it, and the text has it already"
        yield Finding("wrong", what, why, f"take {seen.start} out of the template or out of the text")
    if seen.endless:
        what = f"{'every document ends' if seen.endless == seen.documents else f'{seen.endless:,} documents end'}"
        why = f"{seen.endless:,} {many}: the model would not learn to stop"
        given = "put the end token behind each list of input_ids"
        fix = given if form == "input_ids" else "a template that writes the end token behind the last answer"
        yield Finding("check", f"{what} without an end token", why, fix)
    if seen.spelled_out:
        what = f"{seen.spelled} stands in the text as plain letters"
        why = f"in {seen.spelled_out:,} {many}: the text went through a template before"
        fix = "give the messages and let forerun apply the template; or data.special_tokens=true if you trust the text"
        yield Finding("check", what, why, fix)
    if seen.tokens and seen.unknown_tokens > UNKNOWN * seen.tokens:
        what = f"{share_text(seen.unknown_tokens / seen.tokens)} of the tokens are unknown to the tokenizer"
        yield Finding("check", what, "their text is lost to the model", "another data.tokenizer")
    times, text = seen.most_often
    if seen.repeated > REPEATED * seen.documents or times > REPEATED_TIMES:
        what = f"{seen.repeated:,} {many} repeat an earlier one"
        yield Finding("check", what, f"{times:,} times: “{text}”", "remove the repetitions: they are learned by heart")
