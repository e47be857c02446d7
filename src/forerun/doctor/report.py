"""The command `forerun doctor`: one line per check, followed by the fix if something is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from forerun.doctor.checks import CHECKS
from forerun.doctor.machine import Finding, Machine
from forerun.errors import UserError
from forerun.exit_codes import USER_MISTAKE

NAME_WIDTH = 14
SYMPTOMS_PAGE = "docs/reference/doctor.md#symptoms"


def run(smoke: bool, machine: Machine | None = None, overrides: Sequence[str] = ()) -> int:
    """Run all checks and print their findings.

    Args:
        smoke: Also train for about a minute on this machine's devices.
        machine: The machine to check; this one by default.
        overrides: Changes of the job of `smoke`, such as `device=tpu`.

    Returns:
        The exit code: 0 if nothing failed, else 2.

    Raises:
        UserError: An override is malformed, or is given without `smoke`.
    """
    values = _smoke_values(smoke, overrides)
    here = machine or Machine.here()
    findings = []
    for check in CHECKS:
        findings.append(check(here))
        print(line(findings[-1]), flush=True)
    print(verdict(findings))
    print(f"symptoms and their fixes: {SYMPTOMS_PAGE}")
    code = USER_MISTAKE if any(finding.status == "FAIL" for finding in findings) else 0
    if not smoke:
        return code

    from forerun.doctor import smoke as trial

    return max(code, trial.run(values))


def _smoke_values(smoke: bool, overrides: Sequence[str]) -> dict[str, Any]:
    if not overrides:
        return {}
    if not smoke:
        raise UserError(
            "E-COMMAND-060",
            f"'{overrides[0]}' needs --smoke",
            why="without it, forerun doctor trains nothing, so there is no job to change",
            fix=f"forerun doctor --smoke {' '.join(overrides)}"
            if "=" in overrides[0]
            else "see: forerun doctor --help",
        )
    from forerun.doctor.smoke import values_of

    return values_of(overrides)


def line(finding: Finding) -> str:
    """Return a line such as `ok    disk            52 GiB free`, with the fix on a second line."""
    first = f"{finding.status:4}  {finding.name:{NAME_WIDTH}}  {finding.found}"
    return f"{first}\n{'':6}{'fix:':{NAME_WIDTH}}  {finding.fix}" if finding.fix else first


def verdict(findings: Iterable[Finding]) -> str:
    """Return a summary: how many checks failed and how many warn."""
    states = [finding.status for finding in findings]
    failed, warned = states.count("FAIL"), states.count("warn")
    if not failed and not warned:
        return f"{len(states)} checks, all passed"
    return f"{len(states)} checks: {failed} failed, {warned} with warnings"
