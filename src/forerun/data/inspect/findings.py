"""Findings: probable mistakes in the data, each with what, why and fix. Good data has none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from forerun.data.inspect.corpus_report import CorpusReport, ExaminedDocuments

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
    "split": "split into parts, each a separate segment",
    "keep_start": "cut at the end: the model never sees their ends",
    "keep_end": "cut at the beginning: the model never sees their beginnings",
    "shorten": "cut at the beginning of the prompt, or dropped if the answers alone are too long",
    "drop": "dropped: the model never sees them",
    "stop": "not allowed: the run will not start",
}
LEVELS = ("wrong", "check", "note")


@dataclass(frozen=True)
class Finding:
    """A probable mistake. The levels are `wrong` (do not train on it), `check` (may be wrong) and `note` (harmless)."""

    level: Literal["wrong", "check", "note"]
    what: str
    why: str
    fix: str


def findings(look: CorpusReport) -> list[Finding]:
    """Return the findings about the data of a job, the worst first."""
    found = [*_learning(look), *_rows(look), *_lengths(look), *_amounts(look)]
    if look.documents_examined:
        found += _documents(look.documents_examined, look.form)
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def policy_text(look: CorpusReport) -> str:
    """Return what happens to documents that are longer than the sequence, to complete the sentence "they are ..."."""
    if not look.whole:
        return "cut at the end of the row and continued in the next row: no token is lost"
    return POLICY.get(look.too_long_policy, look.too_long_policy)


def share_text(share: float) -> str:
    """Return a share as a percentage, such as `41 %` or `0.3 %`.

    A share above 0 is never rounded to 0 %, and a share below 1 is never rounded to 100 %.
    """
    percent = 100 * share
    if percent in (0, 100):
        return f"{percent:.0f} %"
    if percent < 0.05:
        return "< 0.1 %"
    if percent >= 99.95:
        return "> 99.9 %"
    return f"{percent:.1f} %" if percent < 10 or percent > 99 else f"{percent:.0f} %"


def _learning(look: CorpusReport) -> Iterator[Finding]:
    rows, documents = look.rows_examined, look.documents_examined
    chat = "messages" in look.form
    template = "check in the samples whether the template marks the answers, as data.chat_template=chatml does"
    fix = f"{template}; data.loss_on=all trains on all tokens" if chat else "data.loss_on=all trains on all tokens"
    name = "conversations" if chat else "documents"
    if rows and rows.rows and not rows.learned:
        why = f"in {rows.rows:,} examined rows, no position has a weight: the loss would always be 0"
        yield Finding("wrong", "no token has a loss", why, fix)
        return
    if documents and documents.unlearned:
        share = documents.unlearned / documents.documents
        what = f"{documents.unlearned:,} of {documents.documents:,} {name} have no token with a loss"
        why = "all their tokens are masked: an answer is missing, empty, or not recognised"
        yield Finding("wrong" if share > 0.5 else "check", what, why, fix)
    if rows and rows.unlearned_rows > UNLEARNED_ROWS * rows.rows:
        share = rows.unlearned_rows / rows.rows
        what = f"{share_text(share)} of the rows have no token with a loss"
        why = "they cost time and give no gradient; a long prompt without its answer can be the cause"
        yield Finding("check", what, why, "use a longer sequence, or data.too_long=drop")
    learned = look.learned_share
    if learned is not None and 0 < learned < LITTLE_LEARNED:
        what = f"only {share_text(learned)} of the tokens have a loss"
        yield Finding(
            "check",
            what,
            "all others are masked",
            "if this is not intended, use data.loss_on=all or another template",
        )


def _rows(look: CorpusReport) -> Iterator[Finding]:
    if look.rows < look.batch:
        what = f"{look.rows:,} rows do not fill one batch of {look.batch:,}"
        why = f"a step uses every row at most once, and these rows are {look.steps_per_epoch:.3g} of a step"
        yield Finding("wrong", what, why, f"use more data, or batch={max(1, look.rows)} at most")
    elif look.epochs and look.epochs > MANY_EPOCHS:
        what = f"the job sees every row about {look.epochs:,.0f} times"
        why = f"the job has {look.steps:,} steps, and an epoch has {look.steps_per_epoch:,.4g}"
        yield Finding(
            "check", what, why, f"use more data, or steps={math.ceil(2 * look.steps_per_epoch)} for two epochs"
        )
    if look.padding_share > PADDING:
        what = f"{share_text(look.padding_share)} of every batch is padding"
        level: Literal["wrong", "check"] = "wrong" if look.padding_share > MUCH_PADDING else "check"
        if look.whole:
            why = "documents are not divided, and they do not fill rows of this length"
            fix = f"data.packing=concatenate, or {_better_sequence(look)}"
        else:
            why = (
                f"{look.tokens:,} tokens make {look.rows:,} rows of {look.sequence:,}, and the last row is almost empty"
            )
            fix = "use more data, or a shorter sequence"
        yield Finding(level, what, why, fix)


def _better_sequence(look: CorpusReport) -> str:
    rounded = -(-look.lengths.percentile(99) // ROUND) * ROUND
    if rounded < look.sequence:
        return f"sequence={rounded}, which still holds 99 % of the documents"
    return f"a sequence that holds several documents, such as {2 * look.sequence}"


def _longer_sequence(look: CorpusReport) -> str:
    """Return a proposal for a sequence that holds 99 % or 90 % of the documents."""
    for percent in (99, 90):
        rounded = -(-look.lengths.percentile(percent) // ROUND) * ROUND
        if look.sequence < rounded <= MUCH_LONGER * look.sequence:
            return f"sequence={rounded} holds {percent} % of them; forerun plan shows the cost"
    return f"use a longer sequence: the longest document has {look.lengths.longest:,} tokens"


def _lengths(look: CorpusReport) -> Iterator[Finding]:
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
        yield Finding("note", what, f"they are {policy_text(look)}", f"none, if this is intended; {fix}")
        return
    bad = look.too_long_policy == "stop" or (lost and share > 0.1)
    more = "; data.too_long=split loses no token" if lost and "pairs" not in look.packing else ""
    yield Finding("wrong" if bad else "check", what, f"they are {policy_text(look)}", fix + more)


def _amounts(look: CorpusReport) -> Iterator[Finding]:
    if look.skipped:
        first = look.skipped_first[0] if look.skipped_first else None
        why = f"the first: {first.place}: {first.reason}" if first else "data.bad_rows allows it"
        share = look.skipped / max(1, look.skipped + look.documents)
        what = f"{look.skipped:,} bad row{'s were' if look.skipped > 1 else ' was'} skipped ({share_text(share)})"
        yield Finding(
            "check" if share > 0.01 else "note", what, why, "fix the rows, or accept this: skipped rows are recorded"
        )
    for source in look.sources:
        if source.passes is not None and source.passes > MANY_PASSES:
            what = f"{source.name}: an epoch has every document {source.passes:.1f} times"
            why = f"{source.documents:,} documents must fill {share_text(source.share or 0)} of the rows"
            yield Finding("check", what, why, f"use a smaller data.mixture.{source.name}.weight, or more data")


def _documents(seen: ExaminedDocuments, form: str) -> Iterator[Finding]:
    many = f"of {seen.documents:,} examined documents"
    if seen.doubled_start:
        whole = seen.doubled_start == seen.documents
        what = (
            f"{'every document begins' if whole else f'{seen.doubled_start:,} documents begin'} with two {seen.start}"
        )
        why = f"{seen.doubled_start:,} {many}: the template writes it, and the text already contains it"
        yield Finding("wrong", what, why, f"remove {seen.start} from the template or from the text")
    if seen.endless:
        what = f"{'every document ends' if seen.endless == seen.documents else f'{seen.endless:,} documents end'}"
        why = f"{seen.endless:,} {many}: the model would not learn to stop"
        given = "add the end token to each list of input_ids"
        fix = given if form == "input_ids" else "use a template that writes the end token after the last answer"
        yield Finding("check", f"{what} without an end token", why, fix)
    if seen.spelled_out:
        what = f"the text contains {seen.spelled} as plain text"
        why = f"in {seen.spelled_out:,} {many}: a template was probably applied to the text before"
        fix = "use the messages and let forerun apply the template; or data.special_tokens=true if you trust the text"
        yield Finding("check", what, why, fix)
    if seen.tokens and seen.unknown_tokens > UNKNOWN * seen.tokens:
        what = f"{share_text(seen.unknown_tokens / seen.tokens)} of the tokens are unknown to the tokenizer"
        yield Finding("check", what, "the model does not see their text", "use another data.tokenizer")
    times, text = seen.most_often
    if seen.repeated > REPEATED * seen.documents or times > REPEATED_TIMES:
        what = f"{seen.repeated:,} {many} repeat an earlier one"
        yield Finding("check", what, f"{times:,} times: “{text}”", "remove the repetitions: the model memorises them")
