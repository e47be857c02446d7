"""`forerun doctor`: one line per check, with the fix beneath where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forerun.doctor import accelerators, surroundings, versions
from forerun.doctor.machine import Finding, Machine
from forerun.errors import USER_MISTAKE

CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    versions.check_python,
    versions.check_jax,
    versions.check_libtpu,
    versions.check_libraries,
    versions.check_torch_xla,
    accelerators.check_devices,
    accelerators.check_tpu_seen,
    accelerators.check_device_count,
    accelerators.check_lock,
    accelerators.check_hosts,
    surroundings.check_platforms,
    surroundings.check_torch_xla_variables,
    surroundings.check_xla_flags,
    surroundings.check_preload,
    surroundings.check_disk,
    surroundings.check_cache,
    surroundings.check_bytecode,
    surroundings.check_memory,
    surroundings.check_shm,
)
NAME_WIDTH = 14


def run(smoke: bool, machine: Machine | None = None) -> int:
    """Print the findings; 0 if nothing failed, else 2. With `smoke`, then train for a minute on what is here."""
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

    return max(code, trial.run())


def line(finding: Finding) -> str:
    """`ok    disk            52 GiB free`, and the fix on a second line."""
    first = f"{finding.status:4}  {finding.name:{NAME_WIDTH}}  {finding.found}"
    return f"{first}\n{'':6}{'fix:':{NAME_WIDTH}}  {finding.fix}" if finding.fix else first


def verdict(findings: Iterable[Finding]) -> str:
    """How many failed and how many only warn."""
    states = [finding.status for finding in findings]
    failed, warned = states.count("FAIL"), states.count("warn")
    if not failed and not warned:
        return f"{len(states)} checks, all well"
    return f"{len(states)} checks: {failed} failed, {warned} to look at"
