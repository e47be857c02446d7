"""The job file that a search writes: the chosen values, each with its reason as a comment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from forerun.config.schema import Job
from forerun.config.source import Dumper
from forerun.errors import UserError
from forerun.files import open_regular, write_output
from forerun.planner.report.formatting import rate_text, seconds_text
from forerun.planner.search.ranking import RankedPlan
from forerun.planner.search.space import Candidate, remat_text
from forerun.resolve.resolved_job import ResolvedJob
from forerun.safe_text import redact
from forerun.units import GIB, Bytes, Usd

MARK = "# Written by `forerun plan --search`"
CHOSEN = ("batch", "micro_batch", "mesh", "remat")


def check_path(path: Path) -> None:
    """Raise an error if the folder is missing, or if the path exists and was not written by a search.

    A search calls this first, so that it does not fail after an hour of compiling.
    """
    if not path.parent.is_dir():
        raise UserError(
            "E-PLAN-022",
            f"--out {path}: there is no folder {path.parent}",
            why="the winning job is written there",
            fix=f"mkdir -p {path.parent}",
        )
    if path.is_dir() or (path.exists() and not _is_ours(path)):
        raise UserError(
            "E-PLAN-023",
            f"--out {path} already exists",
            why="it was not written by a search, so it is not replaced",
            fix="--out another-name.yaml",
        )


def _is_ours(path: Path) -> bool:
    """Return whether a search wrote the file."""
    try:
        with open_regular(path) as file:
            return file.read(len(MARK.encode())) == MARK.encode()
    except (OSError, UserError):
        return False


def write(path: Path, text: str) -> None:
    """Write the file atomically. It is a complete job: if a URL in it has a query, only the user can read it."""
    write_output(path, text, fix="--out another-name.yaml", mode=0o666 if redact(text) == text else 0o600)


def winning_job(
    resolved: ResolvedJob,
    best: RankedPlan,
    others: list[RankedPlan],
    goal: str,
    as_written: RankedPlan | None,
    note: str = "",
) -> str:
    """Return the best plan as the YAML text of a job. Loading it gives exactly the job that was compiled.

    Only `device` is changed if the job names other devices than those of the plan.

    Args:
        resolved: The job before the search.
        best: The plan to write.
        others: All plans that fit. Comments compare the best plan with them.
        goal: The goal of the search.
        as_written: The plan with the job's own values, or None if it was not compiled or does not fit.
        note: A remark for the first line, for example that the search was interrupted.
    """
    chosen = _runs_there(best.candidate.changed(resolved).job, best.candidate.slice.platform)
    reasons = _reasons(resolved.job, best, others)
    if chosen.device != resolved.job.device:
        reasons["device"] = [f"The job named {resolved.job.device!r}. The plan is for {best.candidate.slice.name}."]
    tree = _job_fields(chosen)
    lines = [*_heading(best, goal, as_written, note), ""]
    for name, value in tree.items():
        lines += [f"# {line}" for line in reasons.get(name, [])]
        lines.append(_entry(name, value))
    return "\n".join(lines) + "\n"


def _runs_there(job: Job, platform: str) -> Job:
    """Return the job with `device` set to the platform, unless it allows that platform already."""
    allowed = (job.device,) if isinstance(job.device, str) else job.device
    return job if {"auto", platform} & {*allowed} else job.model_copy(update={"device": platform})


def _job_fields(job: Job) -> dict[str, Any]:
    """Return the fields that differ from their defaults, and always those that the search chose."""
    tree = job.model_dump(mode="json", exclude_defaults=True)
    whole = job.model_dump(mode="json")
    remat = {name: value for name, value in whole["remat"].items() if value}
    wanted = {**tree, **{name: whole[name] for name in CHOSEN}, "remat": remat}
    return {name: wanted[name] for name in whole if name in wanted and wanted[name] is not None}


def _entry(name: str, value: Any) -> str:
    """Return a field as YAML. Mesh and remat take one line each."""
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


def _heading(best: RankedPlan, goal: str, as_written: RankedPlan | None, note: str) -> list[str]:
    """Return the comment lines at the top of the file, with the predictions for the best plan."""
    verdict, name = best.verdict, best.candidate.slice.name
    step = verdict.step
    assert step is not None
    lines = [
        f"{MARK}: the {goal} plan that it found{f' ({note})' if note else ''}.",
        f"# {'Slice' if best.candidate.slice.platform == 'tpu' else 'Machine'}: {name}",
    ]
    cost = "no price known" if best.usd is None else f"{Usd(best.usd)} on demand"
    cost += f" ({best.provider})" if best.provider else ""
    per_chip = (verdict.tokens_per_second or 0) / best.candidate.slice.chips
    lines += [
        f"# Predicted: {seconds_text(step.mid_seconds)} a step ({seconds_text(step.low_seconds)} to "
        f"{seconds_text(step.high_seconds)}), {rate_text(per_chip)} tokens/s per chip, {best.hours:,.3g} hours, {cost}",
        f"# Memory: {verdict.memory.peak_bytes} of {verdict.limit_bytes} per device; program {verdict.program}",
    ]
    if as_written and as_written.candidate != best.candidate:
        lines.append(f"# The job as written takes {seconds_text(as_written.step_seconds)} per step on this slice.")
    return lines


def _reasons(job: Job, best: RankedPlan, others: list[RankedPlan]) -> dict[str, list[str]]:
    """Return comment lines for each chosen field."""
    one = best.candidate
    mesh, batch = one.mesh, job.batch
    accumulation = one.accumulation(batch)
    sums = f"{one.micro_batch} x accumulation {accumulation} x {mesh.data_parallel} data-parallel devices = {batch}"
    return {
        "batch": [f"Not changed by the search. micro_batch {sums}."],
        "micro_batch": [
            _alternatives("micro_batch", best, others) or "No plan was found that differs only in micro_batch."
        ],
        "mesh": [
            f"data x fsdp x tp = {mesh} on {mesh.devices} devices. "
            + (_alternatives("mesh", best, others) or "No plan was found that differs only in mesh.")
        ],
        "remat": [
            f"{remat_text(one.remat)}: {Bytes(best.verdict.spare_bytes)} of HBM to spare. "
            + (_alternatives("remat", best, others) or "No plan was found that differs only in remat.")
        ],
    }


def _alternatives(axis: str, best: RankedPlan, others: list[RankedPlan]) -> str:
    """Return a sentence about the fastest plans that differ from the best only in `axis`; empty if there are none."""
    rivals = [one for one in others if _differs_only(best.candidate, one.candidate, axis)]
    rivals.sort(key=lambda one: one.step_seconds)
    if not rivals:
        return ""
    texts = [
        f"{_value(one.candidate, axis)} {one.step_seconds / best.step_seconds - 1:+.1%} time"
        f" ({one.verdict.memory.peak_bytes / GIB:.1f} GiB)"
        for one in rivals[:3]
    ]
    return "Alternatives: " + "; ".join(texts) + "."


def _value(one: Candidate, axis: str) -> str:
    return remat_text(one.remat) if axis == "remat" else str(getattr(one, axis))


def _differs_only(one: Candidate, other: Candidate, axis: str) -> bool:
    if one.slice.name != other.slice.name:
        return False
    same = {name: getattr(one, name) == getattr(other, name) for name in ("mesh", "micro_batch", "remat")}
    return not same.pop(axis) and all(same.values())
