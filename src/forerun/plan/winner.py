"""The winning job as a file: the values that the search chose, each with its reason as a comment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from forerun.config.schema import Job
from forerun.config.source import Dumper
from forerun.errors import UserError
from forerun.files import open_regular, write_output
from forerun.plan.candidates import Candidate, remat_text
from forerun.plan.figures import rate_text, seconds_text
from forerun.plan.ranking import Found
from forerun.safe_text import redact
from forerun.units import GIB, Bytes, Usd

MARK = "# Written by `forerun plan --search`"
CHOSEN = ("batch", "micro_batch", "mesh", "remat")


def check_path(path: Path) -> None:
    """Before an hour of compiling, not after: the folder is there, and no file of the user's is in the way."""
    if not path.parent.is_dir():
        raise UserError(
            f"--out {path}: there is no folder {path.parent}",
            why="the winning job is written there",
            fix=f"mkdir -p {path.parent}",
        )
    if path.is_dir() or (path.exists() and not _is_ours(path)):
        raise UserError(
            f"--out {path} is there already",
            why="it was not written by a search, so it is not replaced",
            fix="--out another-name.yaml",
        )


def _is_ours(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(MARK.encode())) == MARK.encode()
    except (OSError, UserError):
        return False


def write(path: Path, text: str) -> None:
    """Write the file atomically. It is a complete job: if a URL in it has a query, only the user can read it."""
    write_output(path, text, fix="--out another-name.yaml", mode=0o666 if redact(text) == text else 0o600)


def winning_job(job: Job, best: Found, others: list[Found], goal: str, as_written: Found | None, note: str = "") -> str:
    """YAML text. Loading it gives the job that was compiled, under the same name."""
    chosen = best.candidate.job(job)
    reasons = _reasons(job, best, others)
    tree = _given(chosen)
    lines = [*_heading(best, goal, as_written, note), ""]
    for name, value in tree.items():
        lines += [f"# {line}" for line in reasons.get(name, [])]
        lines.append(_entry(name, value))
    return "\n".join(lines) + "\n"


def _given(job: Job) -> dict[str, Any]:
    """What differs from the defaults, and always what the search chose."""
    tree = job.model_dump(mode="json", exclude_defaults=True)
    whole = job.model_dump(mode="json")
    remat = {name: value for name, value in whole["remat"].items() if value}
    wanted = {**tree, **{name: whole[name] for name in CHOSEN}, "remat": remat}
    return {name: wanted[name] for name in whole if name in wanted and wanted[name] is not None}


def _entry(name: str, value: Any) -> str:
    short = name in CHOSEN and isinstance(value, dict)
    text = yaml.dump(
        value if short else {name: value},
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=1_000_000,
        default_flow_style=short,
    )
    return f"{name}: {text}".rstrip("\n") if short else str(text).rstrip("\n")


def _heading(best: Found, goal: str, as_written: Found | None, note: str) -> list[str]:
    verdict, name = best.verdict, best.candidate.slice.name
    step = verdict.step
    assert step is not None
    lines = [f"{MARK}: the {goal} that it found{f' ({note})' if note else ''}.", f"# Slice: {name}"]
    cost = "no price known" if best.usd is None else f"{Usd(best.usd)} on demand"
    per_chip = (verdict.tokens_per_second or 0) / best.candidate.slice.chips
    lines += [
        f"# Predicted: {seconds_text(step.mid_seconds)} a step ({seconds_text(step.low_seconds)} to "
        f"{seconds_text(step.high_seconds)}), {rate_text(per_chip)} tokens/s per chip, {best.hours:,.3g} hours, {cost}",
        f"# Memory: {verdict.memory.peak_bytes} of {verdict.limit_bytes} per device; program {verdict.program}",
    ]
    if as_written and as_written.candidate != best.candidate:
        lines.append(f"# As it was written, the job takes {seconds_text(as_written.step_seconds)} a step there.")
    return lines


def _reasons(job: Job, best: Found, others: list[Found]) -> dict[str, list[str]]:
    one = best.candidate
    mesh, batch = one.mesh, job.batch
    accumulation = one.accumulation(batch)
    sums = f"{one.micro_batch} x accumulation {accumulation} x {mesh.data_parallel} data-parallel devices = {batch}"
    return {
        "batch": [f"Yours: the search never changes it. micro_batch {sums}."],
        "micro_batch": [_against("micro_batch", best, others) or "No other micro-batch was worth a compile."],
        "mesh": [
            f"data x fsdp x tp = {mesh} on {mesh.devices} devices. "
            + (_against("mesh", best, others) or "No other mesh was worth a compile.")
        ],
        "remat": [
            f"{remat_text(one.remat)}: {Bytes(best.verdict.spare_bytes)} of HBM to spare. "
            + (_against("remat", best, others) or "No other remat was worth a compile.")
        ],
    }


def _against(axis: str, best: Found, others: list[Found]) -> str:
    """How the nearest rivals did that differ in this alone."""
    rivals = [one for one in others if _differs_only(best.candidate, one.candidate, axis)]
    rivals.sort(key=lambda one: one.step_seconds)
    if not rivals:
        return ""
    told = [
        f"{_value(one.candidate, axis)} {one.step_seconds / best.step_seconds - 1:+.1%} time"
        f" ({one.verdict.memory.peak_bytes / GIB:.1f} GiB)"
        for one in rivals[:3]
    ]
    return "Compiled beside it: " + "; ".join(told) + "."


def _value(one: Candidate, axis: str) -> str:
    return remat_text(one.remat) if axis == "remat" else str(getattr(one, axis))


def _differs_only(one: Candidate, other: Candidate, axis: str) -> bool:
    if one.slice.name != other.slice.name:
        return False
    same = {name: getattr(one, name) == getattr(other, name) for name in ("mesh", "micro_batch", "remat")}
    return not same.pop(axis) and all(same.values())
