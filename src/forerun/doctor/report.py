"""The command `forerun doctor`: one line per check, followed by the fix if something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from forerun.doctor import accelerators, environment_checks, versions
from forerun.doctor.machine import Finding, Machine
from forerun.errors import UserError
from forerun.exit_codes import USER_MISTAKE

CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    versions.check_python,
    versions.check_jax,
    versions.check_libtpu,
    versions.check_gpu_compiler,
    versions.check_libraries,
    versions.check_torch_xla,
    accelerators.check_devices,
    accelerators.check_tpu_seen,
    accelerators.check_device_count,
    accelerators.check_lock,
    accelerators.check_hosts,
    environment_checks.check_platforms,
    environment_checks.check_torch_xla_variables,
    environment_checks.check_debug_variables,
    environment_checks.check_xla_flags,
    environment_checks.check_preload,
    environment_checks.check_disk,
    environment_checks.check_cache,
    environment_checks.check_bytecode,
    environment_checks.check_memory,
    environment_checks.check_shm,
)
NAME_WIDTH = 14


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
    print("symptoms and their fixes: python -m forerun.doctor.symptoms")
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
